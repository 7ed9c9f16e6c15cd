"""Text of a benchmark, plain or in colour for a terminal: units and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from opsmith import errors
from opsmith.benchmarking.result import CONTROLS, Benchmark, BenchmarkCase, Contender
from opsmith.benchmarking.timing import SURE, Ratio
from opsmith.benchmarking.verdict import Verdict
from opsmith.extras import install

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("", "", "median", "±", "× reference", "GB/s", "GFLOP/s", "roof")
CALL_COLUMNS = ("", "", "median", "±", "× reference", "× copy_")
DECIMAL = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15))
NOTHING = "–"


ABOVE = "the data was in a cache that the copy cannot use, or other programs slowed the test of the ceiling"
"""Reason for a time that is less than the ceilings allow."""


def duration(seconds: float) -> str:
    """Format seconds with a suitable unit.

    Example:
        >>> duration(0.00123), duration(4.5e-7), duration(2.0)
        ('1.23 ms', '450 ns', '2.00 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9995:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e9)} ns"


def amount(number: float, unit: str) -> str:
    """Format a number with its unit and a decimal prefix.

    Example:
        >>> amount(12_300_000, "B"), amount(7, "B"), amount(5.5e9, "FLOP/s")
        ('12.3 MB', '7 B', '5.50 GFLOP/s')
    """
    if number < 1000 and number == int(number):
        return f"{int(number)} {unit}"
    prefix, size = next(
        ((prefix, size) for prefix, size in reversed(DECIMAL) if number >= size * 0.9995), DECIMAL[0]
    )
    return f"{_digits(number / size)} {prefix}{unit}"


def _digits(number: float) -> str:
    """Format a number with three significant digits, or two if it is below 0.1.

    Example:
        >>> _digits(12.345), _digits(0.0046), _digits(0.0)
        ('12.3', '0.0046', '0.00')
    """
    if 0 < number < 0.0995:
        return f"{number:.2g}"
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def part(number: float) -> str:
    """Format a fraction as a percentage; small ones have one more digit.

    Example:
        >>> part(0.4321), part(0.0042)
        ('43%', '0.4%')
    """
    return f"{number:.1%}" if number < 0.0995 else f"{number:.0%}"


def heading(benchmark: Benchmark) -> str:
    """Return the operator and the machine in one line."""
    threads = "1 thread" if benchmark.threads == 1 else f"{benchmark.threads} threads"
    where = benchmark.environment.get("gpu") or benchmark.environment.get("processor", "")
    return f"{benchmark.operator}: {threads}, {where}, torch {benchmark.environment.get('torch', '')}"


def ceilings(benchmark: Benchmark) -> list[str]:
    """Return the ceilings of the machine, a line for each device and kind."""
    lines = []
    for device in sorted({each.device for each in benchmark.ceilings}):
        copies = sorted(
            (each.bytes or 0, each.rate)
            for each in benchmark.ceilings
            if (each.device, each.kind) == (device, "copy")
        )
        products = [
            f"{amount(each.rate, 'FLOP/s')} in {each.dtype}"
            for each in benchmark.ceilings
            if (each.device, each.kind) == (device, "multiply")
        ]
        if copies:
            size, most = max(copies, key=lambda each: each[1])
            last = f"; {amount(copies[-1][1], 'B/s')} of {amount(copies[-1][0], 'B')}" * (
                size != copies[-1][0]
            )
            lines.append(f"{device} copies {amount(most, 'B/s')} of {amount(size, 'B')}{last}")
        if products:
            lines.append(f"{device} multiplies matrices at {', '.join(products)}")
    return lines


def title(case: BenchmarkCase) -> str:
    """Return the title of a case."""
    return f"{case.label}; {case.dtype}, {case.device}"


def columns(case: BenchmarkCase) -> Sequence[str]:
    """Return the headings of a case's table."""
    return CALL_COLUMNS if case.role == "call" else COLUMNS


def rows(benchmark: Benchmark, case: BenchmarkCase) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a case's table: by direction, the fastest contender first."""
    for direction in case.directions:
        timings = [
            each for each in case.timings if each.direction == direction and each.contender not in CONTROLS
        ]
        work = case.work_of(direction)
        for at, timing in enumerate(sorted(timings, key=lambda each: each.spread.median)):
            spread = timing.spread
            beside = case.ratio(timing.contender, direction)
            line = (
                direction if at == 0 else "",
                timing.contender,
                duration(spread.median),
                f"±{spread.relative:.0%}",
                _beside(timing.contender, beside),
            )
            if case.role == "call":
                copies = case.ratio(timing.contender, direction, "copy")
                yield (*line, NOTHING if copies is None else f"{copies.median:.1f}")
                continue
            fraction = benchmark.fraction(case, timing.contender, direction)
            flops = None if work is None or work.flops is None else work.flops / spread.median
            yield (
                *line,
                NOTHING if work is None else _digits(work.bytes / spread.median / 1e9),
                NOTHING if flops is None else _digits(flops / 1e9),
                NOTHING if fraction is None else part(fraction),
            )


def _beside(contender: str, ratio: Ratio | None) -> str:
    """Format the ratio to the reference with its confidence interval."""
    if ratio is None:
        return NOTHING
    if contender == "reference":
        return "1"
    return f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


DIRECTION_WORDS = {"forward": "forward", "backward": "backward", "both": "forward + backward"}


def remarks(case: BenchmarkCase) -> list[str]:
    """Return the lines below a case's table: work, memory, compilation, and contenders that were left out."""
    lines = []
    if case.role == "size":
        lines += [f"to do: {_work(case)}"] * bool(case.work)
    lines += [_memory(case, each) for each in case.contenders if case.memory_of(each.name) is not None]
    for each in case.contenders:
        if each.compile_s is not None:
            lines.append(
                f"{each.name}: compiled in {each.compile_s:.2f} s, which the times above do not include"
            )
    lines += [f"NOT TIMED: {each.name}: {each.left_out}" for each in case.contenders if each.left_out]
    lines += _less_confident(case)
    return [*lines, *case.notes]


def _less_confident(case: BenchmarkCase) -> Iterator[str]:
    """Yield a remark on each direction with too few rounds for the usual confidence."""
    for direction in case.directions:
        found = case.ratio("reference", direction)
        if found is not None and found.sure < SURE:
            rounds = len(next(each for each in case.timings if each.direction == direction).seconds)
            yield (
                f"{DIRECTION_WORDS[direction]}: intervals of {found.sure:.0%} confidence, because there was "
                f"only time for {rounds} rounds"
            )


def _work(case: BenchmarkCase) -> str:
    parts = []
    for each in case.work:
        flops = "" if each.flops is None else f" and {amount(each.flops, 'FLOP')}"
        parts.append(f"{DIRECTION_WORDS[each.direction]} {amount(each.bytes, 'B')}{flops}")
    return "; ".join(parts)


def _memory(case: BenchmarkCase, contender: Contender) -> str:
    memory = case.memory_of(contender.name)
    assert memory is not None
    parts = []
    if memory.saved is not None and memory.beyond is not None:
        beyond = f" ({amount(memory.beyond, 'B')} without its arguments)"
        parts.append(f"keeps {amount(memory.saved, 'B')} for the backward{beyond}")
    most = memory.remark if memory.peak is None else amount(memory.peak, "B")
    return f"{contender.name}: {', '.join([*parts, f'peak {most}'])}"


def footnotes(benchmark: Benchmark) -> list[str]:
    """Return the legend of the columns, and the remarks."""
    rounds = sorted({timing.spread.count for case in benchmark.cases for timing in case.timings})
    counted = "" if not rounds else f"{rounds[0]} " if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} "
    lines = [
        f"±: half the distance between the quartiles of the {counted}rounds; (..): interval of the ratio "
        f"within rounds, at {SURE:.0%} confidence unless a line says otherwise",
        "roof: the time of a copy of the same bytes, or of a matrix product with the same number of "
        "operations, divided by the median",
        "× copy_: time divided by the time of torch's `copy_` of a tiny tensor, which is almost only the "
        "overhead of a call",
        f"{NOTHING}: not measured, or not known",
        *([f"more than 100% of the roof: {ABOVE}"] if benchmark.above else []),
    ]
    return [*lines, *_spent(benchmark), *benchmark.remarks]


def _spent(benchmark: Benchmark) -> Iterator[str]:
    """Yield the time of the benchmark, and of its parts."""
    if "total" in benchmark.spent:
        parts = ", ".join(
            f"{name} {seconds:.1f} s" for name, seconds in benchmark.spent.items() if name != "total"
        )
        yield f"took {benchmark.spent['total']:.1f} s: {parts}"


def text(benchmark: Benchmark) -> str:
    """Return the whole benchmark as text."""
    lines = [heading(benchmark), *(f"  {line}" for line in ceilings(benchmark))]
    for case in benchmark.cases:
        lines += ["", title(case)]
        table = [tuple(columns(case)), *rows(benchmark, case)]
        widths = [max(len(line[at]) for line in table) for at in range(len(table[0]))]
        for line in table:
            cells = [
                cell.ljust(width) if at < 2 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        lines += [f"  {remark}" for remark in remarks(case)]
    return "\n".join([*lines, "", *footnotes(benchmark)])


STYLES = {"operator": "bold", "reference": "", "compiled": "", "baseline": "italic"}


def rendered(benchmark: Benchmark, verdict: Verdict | None = None) -> RenderableType:
    """Render a benchmark for a terminal, as a renderable of rich.

    Args:
        benchmark: The benchmark.
        verdict: Its comparison with an earlier benchmark.

    Raises:
        MissingExtraError: If rich is not installed.

    Example:
        >>> type(rendered(Benchmark("demo::twice", "quick", 0, 1, {}, {}, (), ()))).__name__
        'Group'
    """
    try:
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError as error:
        raise errors.MissingExtraError(
            "benchmarks in colour need the package `rich`",
            got="no module named 'rich'",
            hint=f"{install('cli')}; or print(benchmark), which needs nothing",
        ) from error

    def indented(line: str, style: str) -> Padding:
        return Padding(Text(line, style=style), (0, 0, 0, 2), expand=False)

    parts: list[RenderableType] = [Text(heading(benchmark), style="bold")]
    parts += [indented(line, "dim") for line in ceilings(benchmark)]
    for case in benchmark.cases:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for at, name in enumerate(columns(case)):
            table.add_column(name, justify="left" if at < 2 else "right", no_wrap=at == 1)
        kinds = {each.name: each.kind for each in case.contenders}
        for direction, contender, *cells in rows(benchmark, case):
            styled = Text(contender, style=STYLES[kinds[contender]])
            table.add_row(Text(direction, style="dim"), styled, *map(Text, cells))
        parts += [Text(), Text(title(case), style="bold cyan"), Padding(table, (0, 0, 0, 2))]
        for remark in remarks(case):
            parts.append(indented(remark, "yellow" if remark.startswith("NOT TIMED") else "dim"))
    parts += [Text(line, style="dim") for line in footnotes(benchmark)]
    if verdict is not None:
        style = "bold green" if verdict.passed else "bold red" if verdict.slower else "bold yellow"
        parts += [Text(), Text(str(verdict), style=style)]
    return Group(*parts)
