"""A report for the terminal: a panel for each failure, then a line for each property."""

from __future__ import annotations

from collections.abc import Sequence

from opsmith import errors
from opsmith.checking.report import Failure, Outcome, Report, evidence_rows, folded
from opsmith.extras import install

try:
    import rich.rule
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
    from rich.padding import Padding
    from rich.syntax import Syntax
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise errors.MissingExtraError(
        "reports in colour need the package `rich`",
        got="no module named 'rich'",
        hint=f"{install('cli')}; or print(report), which needs no extra package",
    ) from error

STYLES = {
    "passed": "green",
    "failed": "bold red",
    "warning": "bold yellow",
    "limit": "cyan",
    "skipped": "yellow",
}

TONES = {"error": "red", "warning": "yellow", "limit": "cyan"}


def rendered(report: Report) -> RenderableType:
    """A report as something that rich prints.

    Example:
        >>> import rich
        >>> from opsmith.checking import Outcome, Report
        >>> rich.print(rendered(Report("demo::twice", (Outcome("forward", "passed"),), seed=0)))
        demo::twice: NOT PASSED: gradient could not be checked
          forward  passed    0.00 s
          0.00 s; seed 0, default effort
    """
    style = "bold red" if report.failed else "bold green" if report.passed_as_asked else "bold yellow"
    whole = [failure for failure in report.failures if failure.is_whole()]
    headings = [failure for failure in report.failures if not failure.is_whole()]
    return Group(
        Text(report.verdict(), style=style),
        *(_panel(failure) for failure in whole),
        *(Text(failure.heading(), style=TONES[failure.severity]) for failure in headings),
        *(Padding(Text(f"note: {remark}", style="yellow"), (0, 0, 0, 2)) for remark in report.remarks),
        *([_table(report.ran())] if report.ran() else []),
        *(
            Padding(
                Text(line.lstrip(), style="dim"), (0, 0, 0, 4 if line.startswith(" ") else 2), expand=False
            )
            for line in (*report.skipped_lines(), report.omissions(), report.times(), report.rejections())
            if line
        ),
    )


def _table(outcomes: Sequence[Outcome]) -> Table:
    """A line for each property, with its notes."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True, justify="right")
    remarked = any(outcome.notes for outcome in outcomes)
    if remarked:
        lines.add_column(overflow="fold", style="dim")
    for outcome in outcomes:
        lines.add_row(
            Text(f"  {outcome.property}"),
            Text(outcome.word(), style=STYLES[outcome.word()]),
            Text(f"{outcome.seconds:.2f} s"),
            *([Text("\n".join(outcome.notes))] if remarked else []),
        )
    return lines


def _panel(failure: Failure) -> RenderableType:
    """A failure between two rules: message, location, evidence and replay."""
    tone = TONES[failure.severity]
    parts: list[RenderableType] = [Text(failure.message)]
    for label, text in failure.guidance():
        line = Text(f"{label}: ", style="bold" if label == "fix" else "dim", overflow="fold")
        parts.append(line.append(text, style="cyan" if label in ("where", "line") else "default"))
    if failure.evidence:
        parts.append(Padding(_evidence(failure), (1, 0, 0, 0)))
    # The code begins in the first column, so that it can be copied.
    code: list[RenderableType] = [Text(), _Code(failure.replay)] if failure.replay else []
    return Group(
        rich.rule.Rule(Text(failure.heading(), style=f"bold {tone}"), align="left", style=tone),
        Padding(Group(*parts), (0, 0, 0, 2)),
        *code,
        Padding(Text(f"more: {failure.address()}", style="cyan"), (0, 0, 0, 2)),
        rich.rule.Rule(style=tone),
    )


def _evidence(failure: Failure) -> Table:
    lines = Table.grid(padding=(0, 2, 0, 0))
    for depth, name, value in evidence_rows(failure.evidence):
        lines.add_row(Text(f"{'  ' * depth}{name}", style="dim"), Text(value))
    return lines


class _Code:
    """Code in lines that fit the terminal and still run when they are copied."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = folded(self.code, options.max_width)
        yield Syntax(text, "python", word_wrap=True, background_color="default")
