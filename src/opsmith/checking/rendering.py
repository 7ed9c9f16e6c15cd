"""A report for the terminal: a table with a line for each property, and a panel for each failure."""

from __future__ import annotations

from opsmith import errors
from opsmith.checking.report import Failure, Outcome, Report, shown
from opsmith.extras import install

try:
    from rich import box
    from rich.console import Group, RenderableType
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.syntax import Syntax
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise errors.MissingExtraError(
        "reports in colour need the package `rich`",
        got=f"no module named {error.name!r}",
        mend=f"{install('cli')}; or print(report), which needs nothing",
    ) from error

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def rendered(report: Report) -> RenderableType:
    """A report as something that rich prints.

    Example:
        >>> import rich
        >>> from opsmith.checking import Outcome, Report
        >>> rich.print(rendered(Report("demo::twice", (Outcome("forward", "passed"),), seed=0)))
        demo::twice: NOT PASSED: gradient could not be checked
         forward   passed   0.00 s
    """
    style = "bold red" if report.failures else "bold green" if report.passed else "bold yellow"
    causes = [failure for failure in report.failures if failure.follows is None]
    followers = [failure for failure in report.failures if failure.follows is not None]
    return Group(
        Text(report.verdict(), style=style),
        _table(report.outcomes),
        *(_panel(failure) for failure in causes),
        *(Text(failure.heading(), style="red") for failure in followers),
    )


def _table(outcomes: tuple[Outcome, ...]) -> Table:
    rows = Table(box=box.SIMPLE, show_header=False, show_edge=False)
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True, justify="right")
    if any(outcome.reason or outcome.notes for outcome in outcomes):
        rows.add_column(overflow="fold", style="dim")
    for outcome in outcomes:
        status = Text(outcome.status, style=STYLES[outcome.status])
        remarks = "\n".join(filter(None, [outcome.reason, *outcome.notes]))
        rows.add_row(
            outcome.property, status, f"{outcome.seconds:.2f} s", *[Text(remarks)] * (len(rows.columns) - 3)
        )
    return rows


def _panel(failure: Failure) -> Panel:
    """A failure: what is wrong, where, what was measured, and how to see it again."""
    parts: list[RenderableType] = [Text(failure.message)]
    if failure.where:
        parts.append(Text(failure.where, style="cyan"))
    if failure.evidence:
        parts.append(Padding(_evidence(failure), (1, 0, 0, 0)))
    if failure.replay:
        code = Syntax(failure.replay, "python", word_wrap=True, background_color="default")
        parts.append(Padding(code, (1, 0, 0, 0)))
    return Panel(Group(*parts), title=Text(failure.heading()), title_align="left", border_style="red")


def _evidence(failure: Failure) -> Table:
    rows = Table.grid(padding=(0, 2))
    for name, value in failure.evidence.items():
        rows.add_row(Text(name, style="dim"), Text(shown(value)))
    return rows
