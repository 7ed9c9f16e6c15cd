"""`opsmith page`: write pages about the operators of a file or module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from opsmith import errors
from opsmith.cli.guard import waiting
from opsmith.cli.options import (
    Operators,
    Quick,
    Seed,
    Thorough,
    Traceback,
    effort_of,
    read_file,
    refuse_unrelated,
)
from opsmith.cli.output import answering, progress_bar
from opsmith.targets import Target


def page(
    target: Operators,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|FOLDER",
            help="A file `.html` for one operator, or a folder for an index and a page for each operator.",
        ),
    ],
    quick: Quick = False,
    thorough: Thorough = False,
    seed: Seed = 0,
    checked: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Reports to use instead of a check: the output of `opsmith check --json`.",
        ),
    ] = None,
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Also benchmark each operator, at quick effort.")
    ] = False,
    benchmarked: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Benchmarks to use: the output of `opsmith benchmark -o FILE`.",
        ),
    ] = None,
    architectures: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            metavar="ARCH",
            help="Compile kernels for CUDA for this architecture, as `sm_90`; may be given again.",
        ),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Write a page about an operator, or an index and a page for each: files that need no network.

    A page has the signature and sources, the handwritten and derived parts, the check, the graph, the tensors
    saved for the backward, the kernels and their GPU resources, benchmarks and ONNX. A part that is missing
    is shown with the reason.

    **Examples**

    - `opsmith page operators.py:linear -o linear.html`

    - `opsmith page mypackage.ops -o pages --benchmark` every operator, with times

    - `opsmith page operators.py -o pages --checked report.json --benchmarked before.json` from files

    Exit status: 0 written, also if the check failed; 2 it could not be written; 130 interrupted.
    """
    with answering(traceback=traceback) as printer:
        effort = effort_of(quick=quick, thorough=thorough)
        if benchmark and benchmarked is not None:
            raise errors.UsageError(
                "`--benchmark` measures, but `--benchmarked` reads earlier results",
                expected="one of them, or none",
                got="both",
                hint="leave one of them out",
            )
        with waiting(f"importing {escape(target)}"):
            operators = Target.of(target).operators()
            from opsmith.benchmarking.result import benchmarks_in
            from opsmith.checking.report import read_reports
            from opsmith.pages import page as write
        names = [each.name for each in operators]
        reports: Any = None
        benchmarks: Any = benchmark
        if checked is not None:
            reports = read_file(checked, "--checked", "opsmith check ... --json >", read_reports)
            refuse_unrelated(checked, "--checked", reports, names, "report")
        if benchmarked is not None:
            benchmarks = read_file(benchmarked, "--benchmarked", "opsmith benchmark ... -o", benchmarks_in)
            refuse_unrelated(benchmarked, "--benchmarked", benchmarks, names, "benchmark")
        given: dict[str, Any] = {"architectures": tuple(architectures)} if architectures else {}
        with progress_bar() as progress:
            files = write(
                operators,
                output,
                reports=reports,
                benchmarks=benchmarks,
                effort=effort,
                seed=seed,
                progress=progress,
                **given,
            )
        printer.write(f"{files[0]}\n")
