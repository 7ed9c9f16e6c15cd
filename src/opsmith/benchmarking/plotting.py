"""Pictures of a benchmark: the roofline, and the times as a function of the size.

The colours are M. Okabe and K. Ito's, which are distinct for colour-blind readers. Every contender has its
own marker and every direction its own line, so that the pictures are readable without colours.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from opsmith import errors
from opsmith.benchmarking.result import DIRECTIONS, Benchmark, BenchmarkCase, Timing
from opsmith.benchmarking.text import ABOVE, DIRECTION_WORDS, amount, duration, part
from opsmith.core.output_file import unwritable
from opsmith.extras import install

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
except ModuleNotFoundError as error:
    raise errors.MissingExtraError(
        "pictures of a benchmark need the package `matplotlib`",
        got=f"no module named {error.name!r}",
        hint=install("benchmark"),
    ) from error

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.")
FORMATS = ("svg", "png", "pdf")
INK = "#1a1b1e"
"""Colour of text and axes; an inline picture has the text colour of its page."""
TEXT_SIZE = 12
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
SIZED = (
    *("font.size", "axes.titlesize", "figure.titlesize", "axes.labelsize"),
    *("xtick.labelsize", "ytick.labelsize", "legend.fontsize"),
)
ROOT = f'role="img" font-size="{TEXT_SIZE}" stroke-linejoin="round" stroke-linecap="butt"'


def roofline(benchmark: Benchmark) -> Figure:
    """Draw operations per second over operations per byte, below the ceilings of the same run."""
    cases = _sized(benchmark)
    figure, panels = _panels(cases, "operations per byte", lambda value: amount(value, "FLOP/s"))
    names = _names(cases)
    points = [
        (work.flops / work.bytes, work.flops / timing.spread.median, timing, case)
        for case in cases
        for timing in _contenders(case)
        if (work := case.work_of(timing.direction)) is not None and work.flops and work.bytes
    ]
    knee = _knee(benchmark)
    reached = [x for x, *_ in points] + (list(knee[:2]) if knee else [])
    heights = [y for _, y, *_ in points] + ([knee[2]] if knee else [])
    for direction, axes in panels.items():
        if reached:
            axes.set(xlim=(min(reached) / 3, max(reached) * 3), ylim=(min(heights) / 3, max(heights) * 3))
            _roofs(axes, benchmark)
        for x, y, timing, case in points:
            if timing.direction == direction:
                colour, marker = _style(names, timing.contender)
                size = 5 + 5 * _rank(cases, case)
                axes.plot([x], [y], marker, color=colour, markersize=size, alpha=0.85)
                if (benchmark.fraction(case, timing.contender, direction) or 0) > 1:
                    axes.plot([x], [y], "o", color=INK, markersize=size + 7, fillstyle="none", label=_CIRCLED)
        for name in names:
            colour, marker = _style(names, name)
            axes.plot([], [], marker, color=colour, label=name)
    _finish(figure, panels, f"{benchmark.operator}: a larger marker is a larger input")
    return figure


def scaling(benchmark: Benchmark) -> Figure:
    """Draw the time of a call over the number of input elements, with the middle half of the rounds."""
    cases = _sized(benchmark)
    figure, panels = _panels(cases, "elements of the inputs", duration)
    names = _names(cases)
    kinds = list(dict.fromkeys((case.dtype, case.device) for case in cases))
    for direction, axes in panels.items():
        for at, kind in enumerate(kinds):
            alike = [case for case in cases if (case.dtype, case.device) == kind]
            for name in names:
                found = [(case.elements, case.timing(name, direction)) for case in alike]
                line = sorted((size, timing.spread) for size, timing in found if timing is not None)
                if not line:
                    continue
                colour, marker = _style(names, name)
                x, label = [size for size, _ in line], name + f", {kind[0]}" * (len(kinds) > 1)
                middles = [each.median for _, each in line]
                axes.plot(x, middles, LINES[at % len(LINES)], marker=marker, color=colour, label=label)
                low, high = [each.low for _, each in line], [each.high for _, each in line]
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    _finish(figure, panels, f"{benchmark.operator}: time of a call, and the middle half of the rounds")
    return figure


_CIRCLED = "circle: faster than its ceiling, because " + ",\n".join(ABOVE.split(", "))
"""Start of the label of a point above the roof."""

PICTURES = {"roofline": roofline, "scaling": scaling}


def plots(benchmark: Benchmark) -> dict[str, str]:
    """Return the pictures as inline SVG for a page: transparent, in the page's colour of text.

    Args:
        benchmark: The benchmark.

    Returns:
        An `<svg>` element for each name, `roofline` and `scaling`, with unique identifiers.
    """
    return {name: svg(benchmark, name, inline=True) for name in PICTURES}


def svg(benchmark: Benchmark, picture: str, *, inline: bool = False) -> str:
    """Return a picture as SVG, with a title and a description for screen readers.

    Args:
        benchmark: The benchmark.
        picture: `roofline` or `scaling`.
        inline: True for a page: transparent, in the page's colours. Otherwise the background is white.
    """
    salt = re.sub(r"\W", "-", f"{benchmark.operator}-{picture}")
    with rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        text = io.StringIO()
        _drawn(benchmark, picture).savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    body = text.getvalue()
    body = body[body.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r"<style.*?</style>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'(<\w+ [^>]*?id="|url\(#|xlink:href="#)', rf"\1{salt}-", body)
    body = re.sub(r' style="([^"]*)"', _attributes, body)
    start = body.index(">") + 1
    view = re.search(r'viewBox="0 0 (\S+) (\S+)"', body)
    assert view is not None
    words = f"<title>{escape(f'{benchmark.operator}: {picture}')}</title>\n"
    words += f"<desc>{escape(picture_text(benchmark, picture))}</desc>\n"
    ground = "" if inline else f'<rect width="{view[1]}" height="{view[2]}" fill="#ffffff"/>\n'
    head = body[:start].replace("<svg", f"<svg {ROOT}", 1)
    found = f"{head}\n{words}{ground}{body[start:].lstrip()}"
    return found.replace(INK, "currentColor") if inline else found


def _attributes(style: re.Match[str]) -> str:
    """Convert a style to attributes, which work under a content security policy that forbids styles."""
    found = []
    for entry in filter(None, (each.strip() for each in style[1].split(";"))):
        name, _, value = (each.strip() for each in entry.partition(":"))
        if name == "font":  # the size, then the font families
            size, _, families = value.partition(" ")
            found += [f'font-size="{size.removesuffix("px")}"', f'font-family="{families}"']
        else:
            found.append(f'{name}="{value.removesuffix("px")}"')
    return "".join(f" {each}" for each in found)


def picture_text(benchmark: Benchmark, picture: str) -> str:
    """Describe a picture: the fastest contender of each size, and its fraction of the ceiling."""
    parts = []
    for case in _sized(benchmark):
        for direction in case.directions:
            timings = [each for each in _contenders(case) if each.direction == direction]
            if not timings:
                continue
            best = min(timings, key=lambda each: each.spread.median)
            fraction = benchmark.fraction(case, best.contender, direction)
            above = f", because {ABOVE}" if (fraction or 0) > 1 else ""
            reached = (
                ""
                if fraction is None or picture == "scaling"
                else f", {part(fraction)} of the ceiling{above}"
            )
            parts.append(
                f"{case.label}, {DIRECTION_WORDS[direction]}: {best.contender} is fastest with "
                f"{duration(best.spread.median)}{reached}"
            )
    return "; ".join(parts) or "nothing was timed"


def save(benchmark: Benchmark, file: str | os.PathLike[str]) -> list[Path]:
    """Write the pictures as two files: `NAME-roofline.svg` and `NAME-scaling.svg` for `NAME.svg`.

    Args:
        benchmark: The benchmark.
        file: Name of the files; its suffix is the format.

    Raises:
        UsageError: If the format is unknown, or nothing can be written there.
    """
    path = Path(file)
    kind = format_of(path)
    written = []
    for name in PICTURES:
        target = path.with_name(f"{path.stem}-{name}{path.suffix}")
        try:
            if kind == "svg":
                target.write_text(svg(benchmark, name), encoding="utf-8")
            else:
                figure, dated = _drawn(benchmark, name), {"CreationDate": None} if kind == "pdf" else {}
                figure.savefig(target, format=kind, dpi=150, metadata=dated, facecolor="white")
        except OSError as error:
            raise unwritable(target, error) from error
        written.append(target)
    return written


def format_of(path: Path) -> str:
    """Return the format of a file name.

    Raises:
        UsageError: If it is not supported.

    Example:
        >>> format_of(Path("out/exp.svg"))
        'svg'
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise errors.UsageError(
            "the format of the picture is not supported",
            expected=", ".join(f"`.{each}`" for each in FORMATS),
            got=f"`{path.name}`",
            hint="name it `benchmark.svg`",
        )
    return kind


def _drawn(benchmark: Benchmark, picture: str) -> Figure:
    settings: Any = dict.fromkeys(INKED, INK) | dict.fromkeys(SIZED, TEXT_SIZE)
    settings |= {"font.family": "sans-serif", "axes.facecolor": "none", "legend.framealpha": 0}
    settings |= {"text.parse_math": False}  # a baseline's name may have dollars in it
    with rc_context(settings):
        figure = PICTURES[picture](benchmark)
    return figure


def _sized(benchmark: Benchmark) -> list[BenchmarkCase]:
    return [case for case in benchmark.cases if case.role == "size"]


def _contenders(case: BenchmarkCase) -> list[Timing]:
    names = {each.name for each in case.contenders}
    return [each for each in case.timings if each.contender in names]


def _names(cases: Sequence[BenchmarkCase]) -> list[str]:
    return list(dict.fromkeys(timing.contender for case in cases for timing in _contenders(case)))


def _style(names: Sequence[str], name: str) -> tuple[str, str]:
    at = names.index(name)
    return COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)]


def _rank(cases: Sequence[BenchmarkCase], case: BenchmarkCase) -> float:
    """Return the rank of a case, from 0 for the smallest inputs to 1 for the largest."""
    sizes = sorted({each.elements for each in cases})
    return sizes.index(case.elements) / max(len(sizes) - 1, 1)


def _copies(benchmark: Benchmark) -> list[tuple[int, float]]:
    """Return the bytes and the rate of each copy, the smallest copy first."""
    return sorted((each.bytes or 0, each.rate) for each in benchmark.ceilings if each.kind == "copy")


def _levels(benchmark: Benchmark) -> list[tuple[float, str]]:
    """Return the rate and the dtype of each matrix product, the fastest first."""
    found = ((each.rate, each.dtype or "") for each in benchmark.ceilings if each.kind == "multiply")
    return sorted(found, reverse=True)


def _knee(benchmark: Benchmark) -> tuple[float, float, float] | None:
    """Return where the slopes of the fastest and of the largest copy meet the highest level."""
    copies, levels = _copies(benchmark), _levels(benchmark)
    if not copies or not levels:
        return None
    top = levels[0][0]
    return top / max(rate for _, rate in copies), top / copies[-1][1], top


def _roofs(axes: Axes, benchmark: Benchmark) -> None:
    """Draw the ceilings: the slope of the largest copy and of the fastest, and a level for each dtype."""
    copies, levels = _copies(benchmark), _levels(benchmark)
    if not copies or not levels:
        return
    (left, right), top = axes.get_xlim(), levels[0][0]
    fastest = max(copies, key=lambda each: each[1])
    for style, (size, rate) in zip(("-", "-."), dict.fromkeys([copies[-1], fastest]), strict=False):
        knee = top / rate
        label = f"copy of {amount(size, 'B')}: {amount(rate, 'B/s')}"
        axes.plot([left, knee], [left * rate, top], style, color=INK, linewidth=1.2, label=label)
    for style, (rate, dtype) in zip(LINES[1:], levels, strict=False):
        label = f"matrices, {dtype}: {amount(rate, 'FLOP/s')}"
        axes.plot([rate / fastest[1], right], [rate, rate], style, color=INK, linewidth=1.2, label=label)


def _tick(text: str) -> str:
    """Remove trailing zeros from the label of a tick."""
    return re.sub(r"\.0+(?= )", "", text).strip()


def _panels(
    cases: Sequence[BenchmarkCase], across: str, height: Callable[[float], str]
) -> tuple[Figure, dict[str, Axes]]:
    """Make a figure with a panel for each direction; both axes are logarithmic.

    Args:
        cases: The cases.
        across: Label of the horizontal axis.
        height: Formats a number of the vertical axis.
    """
    directions = [each for each in DIRECTIONS if any(each in case.directions for case in cases)] or [
        "forward"
    ]
    figure = Figure(figsize=(2.4 + 3.2 * len(directions), 4.8), layout="constrained")
    row = figure.subplots(1, len(directions), sharex=True, sharey=True, squeeze=False)[0]
    for direction, axes in zip(directions, row, strict=True):
        axes.set(xscale="log", yscale="log", title=DIRECTION_WORDS[direction], xlabel=across)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(amount(value, ""))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(height(value))))
    return figure, dict(zip(directions, row, strict=True))


def _finish(figure: Figure, panels: Mapping[str, Axes], title: str) -> None:
    for axes in panels.values():
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            if high < 100 * low:
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3, linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    lines = [line for axes in panels.values() for line in axes.get_lines()]
    legend = {str(line.get_label()): line for line in lines if not _UNNAMED.fullmatch(str(line.get_label()))}
    if legend:
        # matplotlib leaves out labels that begin with `_`, such as a baseline's name, so set them afterwards.
        numbers = [str(at) for at in range(len(legend))]
        made = figure.legend([*legend.values()], numbers, loc="outside lower center", ncols=len(panels))
        for text, label in zip(made.get_texts(), legend, strict=True):
            text.set_text(label)
    figure.suptitle(title)


_UNNAMED = re.compile(r"_child\d+")
"""Start of the labels that matplotlib gives to lines without a label."""
