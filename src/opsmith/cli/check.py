"""`opsmith check`: every property of every operator of a file or module."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from opsmith import checking, errors
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.rendering import rendered
from opsmith.checking.report import SCHEMA, Report
from opsmith.cli.guard import FAILED, UNUSABLE, complain, guarded, waiting
from opsmith.core.operator import Operator
from opsmith.locating import Target

EPILOG = "\n\n".join(
    ["**Properties**", *(f"- `{known.name}` {known.title}" for known in PROPERTIES.values())]
)
"""What the help ends in: what `--only` and `--skip` take."""


@dataclass
class Tally:
    """What has come of the operators so far."""

    reports: list[Report] = field(default_factory=list)
    unchecked: list[errors.OpsmithError] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        if self.unchecked:
            return UNUSABLE
        return 0 if all(report.passed_as_asked for report in self.reports) else FAILED

    def summary(self) -> str:
        """How many passed, in a line."""
        passed = sum(report.passed_as_asked for report in self.reports)
        parts = [f"{passed} passed", f"{len(self.reports) - passed} not passed"]
        parts += [f"{len(self.unchecked)} could not be checked"] if self.unchecked else []
        return f"{len(self.reports) + len(self.unchecked)} operators: {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "schema": SCHEMA,
            "passed": self.status == 0,
            "reports": [report.to_dict() for report in self.reports],
            "unchecked": [{"operator": error.operator, "message": str(error)} for error in self.unchecked],
        }


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_MODULE[:NAME]",
            help="A `.py` file or a module, and which of its operators; all of them without `:NAME`.",
            show_default=False,
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")
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
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """Check operators: results, gradients, second order, side effects and more, against their references.

    **Examples**

    - `opsmith check operators.py` every operator that the file declares

    - `opsmith check operators.py:linear` the one that the variable `linear` holds

    - `opsmith check mypackage --skip integration` a package with all its modules

    - `opsmith check mypackage.ops:mylib::linear --json > report.json`

    Exit status: 0 all that was asked for passed, 1 something did not, 2 it could not be checked.
    """
    out = sys.stdout
    with guarded(traceback=traceback), redirect_stdout(sys.stderr):  # what the operators print is no report
        with waiting(f"importing {escape(target)}"):
            operators = Target.of(target).operators()
        tally = _checked(operators, out, as_json, {"only": only or None, "skip": skip, "seed": seed})
        if as_json:
            out.write(json.dumps(tally.to_dict(), indent=2, allow_nan=False) + "\n")
        elif len(tally.reports) + len(tally.unchecked) > 1:
            out.write(f"\n{tally.summary()}\n")
    raise typer.Exit(tally.status)


def _checked(
    operators: list[Operator[..., Any]], out: TextIO, as_json: bool, options: dict[str, Any]
) -> Tally:
    """Check them one after the other, and print each report when it is there."""
    tally = Tally()
    console = Console(file=out)
    for operator in operators:
        try:
            with _progress(operator.name) as progress:
                report = checking.check(operator, progress=progress, **options)
        except (errors.MissingSamplesError, errors.SampleError) as error:
            tally.unchecked.append(error)  # the other operators can still be checked
            complain(error)
            continue
        tally.reports.append(report)
        if not as_json:
            console.print(rendered(report))
    return tally


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that is gone afterwards; none where stderr is no terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)

        def advance(check: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name} {check}", completed=done, total=total)

        yield advance
