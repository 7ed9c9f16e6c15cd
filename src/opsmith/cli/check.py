"""`opsmith check`: every property of every operator of a file or module."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from opsmith import checking, errors
from opsmith.checking.isolation import limit_of
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.rendering import rendered
from opsmith.checking.report import Report
from opsmith.cli.checked import GUESSED, Checked, everything
from opsmith.cli.guard import complain, guarded, waiting
from opsmith.cli.tally import Tally
from opsmith.locating import Target

EPILOG = "\n\n".join(
    ["**Properties**", *(f"- `{known.name}` {known.title}" for known in PROPERTIES.values())]
)
"""What the help ends in: what `--only` and `--skip` take."""


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_MODULE[:NAME]",
            help="A `.py` file or a module, and which of its operators or Functions; all of its operators "
            "without `:NAME`, or all of its Functions where it has none.",
            show_default=False,
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Look at less: some 2 seconds for each operator.")
    ] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Look at more: more inputs, more repeats; minutes.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of samples and probes: the same seed, the same report.")
    ] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROPERTY", help="Check this property alone; may be given again.", show_default=False
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROPERTY", help="Leave this property out; may be given again.", show_default=False
        ),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE_OR_MODULE:]NAME",
            help="Check it on these: a list of tuples of arguments, or a function that returns one.",
            show_default=False,
        ),
    ] = None,
    isolate: Annotated[
        bool,
        typer.Option("--isolate", help="Run each property in a child process: a crash is a finding then."),
    ] = False,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="With `--isolate`: how long a property may take; 300 by default.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the reports as a page, too.", show_default=False),
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """Check operators: results, gradients, second order, side effects and more, against their references.

    A plain `autograd.Function` can be checked as it is; without `--samples` its arguments are guessed.

    **Examples**

    - `opsmith check operators.py` every operator that the file declares

    - `opsmith check operators.py:linear --quick` the one that the variable `linear` holds

    - `opsmith check mypackage --skip integration --html report.html` a package with all its modules

    - `opsmith check functions.py:Swish --samples SWISH_SAMPLES` a Function, on the file's `SWISH_SAMPLES`

    - `opsmith check mypackage.ops:mylib::linear --json > report.json`

    Exit status: 0 all that was asked for passed, 1 something did not, 2 it could not be checked.
    """
    out = sys.stdout
    with guarded(traceback=traceback), redirect_stdout(sys.stderr):  # what the operators print is no report
        options = {
            "only": only or None,
            "skip": skip,
            "seed": seed,
            "effort": _effort(quick=quick, thorough=thorough),
            "isolate": _isolation(isolate=isolate, limit=limit),
        }
        write = None if html is None else _page_writer(html)
        place = Target.of(target)
        with waiting(f"importing {escape(target)}"):
            found = everything(place, samples)
        tally = _checked(found, out, as_json, options)
        aside = place.left_aside()
        if aside:
            typer.echo(_about_functions(place, aside), err=True)
        if write is not None:
            write(tally)
        if as_json:
            out.write(json.dumps(tally.to_dict(), indent=2, allow_nan=False) + "\n")
        elif len(tally.reports) + len(tally.unchecked) > 1:
            out.write(f"\n{tally.summary()}\n")
    raise typer.Exit(tally.status)


def _effort(*, quick: bool, thorough: bool) -> str:
    if quick and thorough:
        raise errors.UsageError(
            "`--quick` and `--thorough` are opposites",
            expected="one of them, or none",
            got="both",
            mend="leave one of them out",
        )
    return "quick" if quick else "thorough" if thorough else "default"


def _isolation(*, isolate: bool, limit: float | None) -> bool | float:
    if limit is not None and not isolate:
        raise errors.UsageError(
            "`--limit` is for a check in child processes",
            expected="`--isolate` beside it",
            mend=f"write `--isolate --limit {limit:g}`",
        )
    return isolate if limit is None else limit


def _about_functions(target: Target, names: list[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    which, its = ("Functions", "them") if len(names) > 1 else ("Function", "it")
    return (
        f"opsmith: {target.place} also has the {which} {listed}, of which no operator was adopted; check "
        f"{its} with `opsmith check {target.place}:{names[0]}`"
    )


def _checked(found: list[Checked], out: TextIO, as_json: bool, options: dict[str, Any]) -> Tally:
    """Check them one after the other, and print each report when it is there."""
    tally = Tally()
    console = Console(file=out)
    for each in found:
        try:
            with _progress(each.name) as progress:
                report = _report(each, {**options, "progress": progress})
        except (errors.MissingSamplesError, errors.SampleError) as error:
            tally.unchecked.append(error)  # the other operators can still be checked
            complain(error)
            continue
        tally.reports.append(report)
        if not as_json:
            console.print(rendered(report))
    return tally


def _report(each: Checked, options: dict[str, Any]) -> Report:
    guessed = each.guess(options["seed"], limit_of(options["isolate"]))
    if guessed is None:
        return checking.check(each.value, samples=each.samples, **options)
    report = checking.check(each.value, samples=guessed.samples, **options)
    remark = GUESSED.format(words=guessed.words, how=each.how())
    return replace(report, remarks=(*report.remarks, remark))


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that is gone afterwards; none where stderr is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(name), total=None)

        def advance(check: str, done: int, total: int) -> None:
            bar.update(task, description=f"{escape(name)} {check}", completed=done, total=total)

        yield advance


def _page_writer(file: Path) -> Callable[[Tally], None]:
    """What writes the page; that it cannot be written is known before anything is checked for it.

    Raises:
        UsageError: If the file's folder is not there, or it is a folder.
        MissingExtraError: If a package for it is missing.
    """
    from opsmith.checking.page import page

    if file.is_dir() or not file.parent.is_dir():
        raise errors.UsageError(
            f"the page cannot be written to `{file}`",
            expected="a file in a folder that is there",
            got="a folder" if file.is_dir() else f"there is no folder `{file.parent}`",
            mend="make the folder first, or name another file",
        )

    def write(tally: Tally) -> None:
        unchecked = [(error.operator or "", str(error)) for error in tally.unchecked]
        file.write_text(page(tally.reports, unchecked), encoding="utf-8")
        typer.echo(f"opsmith: the page is in {file}", err=True)

    return write
