"""`opsmith benchmark`: time operators and their references, and compare with an earlier benchmark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from opsmith import errors
from opsmith.cli.guard import FAILED, UNUSABLE, complain, waiting
from opsmith.cli.options import (
    AsJson,
    Operators,
    Traceback,
    effort_of,
    in_options,
    named_as_options,
    read_file,
    refuse_unrelated,
    value_named,
)
from opsmith.cli.output import Output, answering, progress_bar
from opsmith.core.operator import Operator
from opsmith.core.output_file import replace_file, writable_file
from opsmith.targets import Target

SCHEMA = 2
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""


def benchmark(
    target: Operators,
    quick: Annotated[bool, typer.Option("--quick", help="One size and few rounds.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="More sizes and more rounds.")] = False,
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES=NUMBERS",
            help="Sizes to measure, as `B=8` or `'H W=14,28,56'`: letters of `shapes=`, numbers among the "
            "arguments, or parameters of `--samples`; may be given again.",
        ),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE_OR_MODULE:]NAME",
            help="Calls to measure: a list of tuples of arguments, or a function that returns this list.",
        ),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FILE_OR_MODULE:]NAME",
            help="A function with the operator's arguments to compare with; may be given again.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DTYPE",
            help="dtype of floating inputs: `bfloat16`; may be given again.",
            show_default="float32",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="`cpu`, or `cuda` where there is a GPU.")] = "cpu",
    direction: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIRECTION",
            help="`forward`, `backward` or `both`; may be given again.",
            show_default="all three",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Number of threads of torch.", show_default="torch's own")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled/--no-compiled", help="Time the reference under `torch.compile`, too.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of the numbers, and of the order of turns.")] = 0,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with an earlier benchmark, the output of `--json` or of `-o`.",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="With `--against`: the smallest slowdown that counts, as a fraction.")
    ] = 0.1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the benchmark as JSON."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the roofline and the times: `FILE.svg` becomes `FILE-roofline.svg` and "
            "`FILE-scaling.svg`; also `.png`, `.pdf`.",
        ),
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Time operators, their references, the compiled references and baselines, in turns, in one run.

    Each operator is checked first, and not benchmarked if it fails. If the results of a contender differ from
    the reference, it is reported, but not timed.

    **Examples**

    - `opsmith benchmark operators.py` all operators of the file, in sizes grown from their samples

    - `opsmith benchmark operators.py:linear --size B=64 --size 'M N=256,512,1024'`

    - `opsmith benchmark operators.py:linear --baseline by_einsum --plot linear.svg`

    - `opsmith benchmark operators.py -o before.json`, and later `opsmith benchmark operators.py --against
    before.json`

    Exit status: 0 measured, and nothing is slower than before, 1 something is slower, or is wrong, 2
    something could not be measured, compared or written, 130 interrupted.
    """
    status = 0
    with answering(as_json=as_json, traceback=traceback) as printer:
        options: dict[str, Any] = {
            "sizes": _sizes(size),
            "dtypes": [_dtype(name) for name in dtype or ["float32"]],
            "device": device,
            "directions": direction or ("forward", "backward", "both"),
            "threads": threads,
            "compiled": compiled,
            "seed": seed,
            "effort": effort_of(quick=quick, thorough=thorough),
        }
        if plot is not None:
            from opsmith.benchmarking.plotting import format_of

            format_of(plot)
            writable_file(plot, "benchmark.svg", "--plot")
        if output is not None:
            writable_file(output, "benchmark.json", "--output")
        from opsmith.benchmarking.verdict import refuse_tolerance

        with named_as_options(benchmark):
            refuse_tolerance(tolerance)
        parsed = Target.of(target)
        with waiting(f"importing {escape(target)}"):
            found = parsed.operators()
            options |= _samples_and_baselines(parsed, found, samples, baseline)
        before: Mapping[str, Any] = {}
        if against is not None:
            from opsmith.benchmarking.result import benchmarks_in

            before = read_file(against, "--against", "opsmith benchmark ... -o", benchmarks_in)
            refuse_unrelated(against, "--against", before, [each.name for each in found], "benchmark")
        done: list[Any] = []
        verdicts: list[Any] = []
        unmeasured: list[errors.OpsmithError] = []
        for each in found:
            try:
                made = _measured(each, options)
            except errors.OpsmithError as error:
                unmeasured.append(error)
                complain(error)
                status = max(status, FAILED if isinstance(error, errors.NotPassedError) else UNUSABLE)
                continue
            status = max(status, FAILED if made.wrong else 0)
            verdict = made.against(before[each.name], tolerance=tolerance) if each.name in before else None
            done.append(made)
            if before and verdict is None:
                typer.echo(
                    f"opsmith: `{against}` does not have `{each.name}`: nothing to compare with", err=True
                )
            if verdict is not None:
                verdicts.append(verdict)
                status = max(status, FAILED if verdict.slower else 0 if verdict.comparable else UNUSABLE)
            if not as_json:
                _show(printer, made, verdict, first=len(done) == 1)
            if plot is not None:
                _plot(made, plot, several=len(found) > 1)
        written = json.dumps(_to_dict(done, verdicts, unmeasured), indent=2, allow_nan=False) + "\n"
        if as_json:
            printer.write(written)
        if output is not None:
            replace_file(output, written.encode())
    raise typer.Exit(status)


_NUMBER = re.compile("[0-9]{1,18}")


def _sizes(given: list[str] | None) -> dict[str, list[int]] | None:
    """Parse sizes such as `'H W=14,28'` into the form of `sizes=`."""
    if not given:
        return None
    found: dict[str, list[int]] = {}
    for text in given:
        names, equals, numbers = text.partition("=")
        parts = [each.strip() for each in numbers.split(",")]
        fits = names.split() and equals and all(map(_NUMBER.fullmatch, parts))
        if not fits or not {*names.split()}.isdisjoint(" ".join(found).split()):
            raise errors.UsageError(
                f"`{text}` names {'a size that was given before' if fits else 'no sizes'}",
                argument="--size",
                expected="NAMES=NUMBERS, with different names",
                got=text,
                hint="write `--size B=8` or `--size 'H W=14,28,56'`",
            )
        found[names] = [int(each) for each in parts]
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise errors.UsageError(
            f"`{name}` must be a floating dtype",
            argument="--dtype",
            expected="`float32`, `float64`, `bfloat16`, `float16` or another of torch's",
            got=name,
            hint="write `--dtype bfloat16`",
        )
    return found


def _samples_and_baselines(
    target: Target, found: list[Operator[..., Any]], samples: str | None, baselines: list[str] | None
) -> dict[str, Any]:
    """Return the samples and baselines that options name; these options allow only one operator."""
    given = [f"--samples {samples}"] * (samples is not None)
    given += [f"--baseline {each}" for each in baselines or []]
    if given and len(found) != 1:
        raise errors.UsageError(
            f"`{given[0].split()[0]}` is for one operator, but `{target.source}` has {len(found)} operators",
            expected=f"one of {', '.join(f'`{each.name}`' for each in found)}",
            hint=f"name one: `opsmith benchmark {target.source}:{found[0].name} {' '.join(given)}`",
        )
    short = [text.rpartition(":")[2] for text in baselines or []]
    named = {
        name if short.count(name) == 1 else text: _value(target, text, "a function")
        for name, text in zip(short, baselines or [], strict=True)
    }
    wanted = "a list of tuples of arguments, or a function that returns this list"
    return {
        "samples": None if samples is None else _value(target, samples, wanted),
        "baselines": named,
    }


def _value(target: Target, text: str, expected: str) -> Any:
    hint = "define `{name}` there, or name the variable that has the value: `FILE_OR_MODULE:NAME`"
    return value_named(text, target, what="nothing", expected=expected, hint=hint)


def _measured(each: Operator[..., Any], options: dict[str, Any]) -> Any:
    from opsmith.benchmarking import benchmark as measure  # torch's compiler is loaded only when it is needed

    with named_as_options(benchmark), progress_bar(each.name, "check", threaded=False) as progress:
        return measure(each, **options, progress=progress)


def _show(printer: Output, made: Any, verdict: Any, *, first: bool) -> None:
    from opsmith.benchmarking.text import rendered

    if not first:
        printer.write("\n")
    remarks = tuple(in_options(each, benchmark) for each in made.remarks)
    printer.show(rendered(replace(made, remarks=remarks), verdict))


def _plot(made: Any, plot: Path, *, several: bool) -> None:
    from opsmith.benchmarking.plotting import save

    short = made.operator.partition("::")[2]
    file = plot.with_name(f"{plot.stem}-{short}{plot.suffix}") if several else plot
    for written in save(made, file):
        typer.echo(f"opsmith: a picture is in {written}", err=True)


def _to_dict(done: list[Any], verdicts: list[Any], unmeasured: list[errors.OpsmithError]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "benchmarks": [each.to_dict() for each in done],
        "verdicts": [each.to_dict() for each in verdicts],
        "unmeasured": [{"operator": error.operator, "message": str(error)} for error in unmeasured],
    }
