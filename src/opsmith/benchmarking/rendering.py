"""A benchmark for the terminal: a table for each size."""

from __future__ import annotations

from opsmith import errors
from opsmith.benchmarking.result import Benchmark, Case
from opsmith.benchmarking.telling import ceilings, columns, footnotes, heading, remarks, rows, title
from opsmith.benchmarking.verdict import Verdict
from opsmith.extras import install

try:
    from rich.console import Group, RenderableType
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise errors.MissingExtraError(
        "benchmarks in colour need the package `rich`",
        got="no module named 'rich'",
        hint=f"{install('cli')}; or print(benchmark), which needs nothing",
    ) from error

KINDS = {"operator": "bold", "reference": "", "compiled": "", "rival": "italic"}


def rendered(benchmark: Benchmark, verdict: Verdict | None = None) -> RenderableType:
    """A benchmark as something that rich prints.

    Args:
        benchmark: The benchmark.
        verdict: What it is beside an earlier one.

    Example:
        >>> type(rendered(Benchmark("demo::twice", "quick", 0, 1, {}, {}, (), ()))).__name__
        'Group'
    """
    parts: list[RenderableType] = [Text(heading(benchmark), style="bold")]
    parts += [_indented(line, "dim") for line in ceilings(benchmark)]
    for case in benchmark.cases:
        parts += [
            Text(),
            Text(title(case), style="bold cyan"),
            Padding(_table(benchmark, case), (0, 0, 0, 2)),
        ]
        parts += [
            _indented(remark, "yellow" if remark.startswith("NOT TIMED") else "dim")
            for remark in remarks(case)
        ]
    parts += [Text(line, style="dim") for line in footnotes(benchmark)]
    if verdict is not None:
        style = "bold green" if verdict.passed else "bold red" if verdict.slower else "bold yellow"
        parts += [Text(), Text(str(verdict), style=style)]
    return Group(*parts)


def _indented(line: str, style: str) -> RenderableType:
    return Padding(Text(line, style=style), (0, 0, 0, 2), expand=False)


def _table(benchmark: Benchmark, case: Case) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for at, name in enumerate(columns(case)):
        table.add_column(name, justify="left" if at < 2 else "right", no_wrap=at == 1)
    kinds = {each.name: each.kind for each in case.contenders}
    for direction, contender, *cells in rows(benchmark, case):
        styled = Text(contender, style=KINDS[kinds[contender]])
        table.add_row(Text(direction, style="dim"), styled, *map(Text, cells))
    return table
