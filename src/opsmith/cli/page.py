"""`opsmith page`: all that is known about the operators of a file or module, as pages to read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape

from opsmith import errors
from opsmith.cli.guard import guarded, waiting
from opsmith.cli.options import Operators, Traceback, effort_of
from opsmith.cli.output import Output
from opsmith.cli.progress import progress_bar
from opsmith.locating import Target

T = TypeVar("T")


def page(
    target: Operators,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|FOLDER",
            help="Where it goes: a file `.html` for one operator, or a folder, for an index and a page each.",
            show_default=False,
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Check less: some 2 seconds for each.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="Check more: minutes.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the check.")] = 0,
    checked: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Check nothing: take the reports that `opsmith check --json` printed.",
            show_default=False,
        ),
    ] = None,
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Benchmark each, too, at quick effort.")
    ] = False,
    benchmarked: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take the benchmarks that `opsmith benchmark -o FILE` wrote.",
            show_default=False,
        ),
    ] = None,
    architectures: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            metavar="ARCH",
            help="Compile kernels for CUDA for this architecture, as `sm_90`; may be given again.",
            show_default=False,
        ),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Write a page about an operator, or an index and a page each: files that ask no network for anything.

    A page has signature and sources, what is handwritten and what is derived, the check, the graph, what is
    saved for the backward, the kernels and what they take of a GPU, benchmarks, ONNX. What cannot be looked
    at is said to be absent, with the reason.

    **Examples**

    - `opsmith page operators.py:linear -o linear.html`

    - `opsmith page mypackage.ops -o pages --benchmark` every operator, with times

    - `opsmith page operators.py -o pages --checked report.json --benchmarked before.json` of what is known

    Exit status: 0 written, whatever the check found; 2 it could not be written; 130 interrupted.
    """
    out = sys.stdout
    with guarded(traceback=traceback), redirect_stdout(sys.stderr):  # what the operators print is no answer
        shown = Output(out)
        effort = effort_of(quick=quick, thorough=thorough)
        if benchmark and benchmarked is not None:
            raise errors.UsageError(
                "`--benchmark` measures, and `--benchmarked` takes what was measured",
                expected="one of them, or none",
                got="both",
                hint="leave one of them out",
            )
        with waiting(f"importing {escape(target)}"):
            operators = Target.of(target).operators()
            from opsmith.pages import page as write
            from opsmith.pages.benchmarks import read_benchmarks
            from opsmith.pages.reports import read_reports_of
        names = [each.name for each in operators]
        known = {} if checked is None else _of(checked, read_reports_of(checked), names, "report")
        measured: Any = benchmark
        if benchmarked is not None:
            measured = _of(benchmarked, read_benchmarks(benchmarked), names, "benchmark")
        given: dict[str, Any] = {"architectures": tuple(architectures)} if architectures else {}
        with progress_bar() as progress:
            files = write(
                operators,
                output,
                reports=known,
                benchmarks=measured,
                effort=effort,
                seed=seed,
                progress=progress,
                **given,
            )
        shown.write(f"{files[0]}\n")
        shown.close()


def _of(file: Path, found: Mapping[str, T], names: list[str], what: str) -> Mapping[str, T]:
    """What a file holds, which is of one of the operators at least.

    Raises:
        UsageError: If it is of others alone.
    """
    if not found.keys() & {*names}:
        raise errors.UsageError(
            f"`{file}` has no {what} of what the pages are about",
            expected=f"one of {', '.join(f'`{name}`' for name in names)}",
            got=", ".join(f"`{name}`" for name in found) or f"no {what} at all",
            hint="name the file that has it, or leave it out",
        )
    return found
