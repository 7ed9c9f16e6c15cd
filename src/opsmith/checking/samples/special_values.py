"""Values at which operators go wrong, put in among the ordinary values of a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Values that are tried together.

    Args:
        name: What they are, in words.
        values: The values.
        finite: Whether gradients are held there: arithmetic with infinities and nan, and where squares or
            their reciprocals overflow, differs between implementations that are as good.
        everywhere: Whether a value fills a row, and then the whole input. Then much is equal, and what is
            right for each element alone need not be so: gradients are held to be finite, and no more.
    """

    name: str
    values: tuple[float, ...]
    finite: bool = True
    everywhere: bool = False


def groups(dtype: torch.dtype, boundaries: Sequence[float]) -> list[Group]:
    """The values to try in a dtype.

    Args:
        dtype: The real dtype.
        boundaries: Where the operator was seen to change from one piece to another.
    """
    info = torch.finfo(dtype)
    found = [
        Group("zeros", (0.0, -0.0)),
        Group("nothing but zeros", (0.0,), everywhere=True),
        Group("small whole numbers and halves", (1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0)),
        Group("values further out", (-6.5, 6.5, 11.0, -11.0, 27.0, -27.0)),
        Group("large values", (100.0, -100.0, 1000.0, -1000.0)),
        Group("values near overflow", (info.max / 4, -info.max / 4, info.max**0.5), finite=False),
        Group("small values", (info.eps, -info.eps, info.eps**2)),
        Group("tiny values", (info.tiny, -info.tiny), finite=False),
        Group("denormal values", (info.tiny / 8, -info.tiny / 8), finite=False),
        Group("infinities", (torch.inf,), finite=False),
        Group("infinities", (-torch.inf,), finite=False),
        Group("nan", (torch.nan,), finite=False),
    ]
    if boundaries:
        found.insert(0, Group("boundaries between its pieces", tuple(boundaries)))
    return found


def placed(
    value: Tensor, group: Group, generator: torch.Generator
) -> Iterator[tuple[Tensor, dict[int, float]]]:
    """A tensor with some numbers in place of at most half of its elements, as often as that takes.

    Args:
        value: The tensor; of a complex one the numbers become the real part.
        group: The numbers; those that stand everywhere fill the first row, and then all of it.
        generator: Source of the positions.

    Yields:
        The tensor, and which number stands at which position.
    """
    if group.everywhere:
        yield from _filled(value, group.values)
        return
    numbers = group.values
    count = value.numel()
    slots = max(1, count // 2)
    for start in range(0, len(numbers), slots):
        some = numbers[start : start + slots]
        positions: list[int] = torch.randperm(count, generator=generator)[: len(some)].tolist()
        other = value.clone(memory_format=torch.contiguous_format)
        for position, number in zip(positions, some, strict=True):
            other.view(-1)[position] = number
        yield other, dict(zip(positions, some, strict=True))


def _filled(value: Tensor, numbers: Sequence[float]) -> Iterator[tuple[Tensor, dict[int, float]]]:
    count = value.numel()
    row = value.shape[-1] if value.dim() else 1
    for number in numbers:
        for end in dict.fromkeys((row, count)):
            other = value.clone(memory_format=torch.contiguous_format)
            other.view(-1)[:end] = number
            yield other, dict.fromkeys(range(end), number)


GRID = (
    -12.0,
    -7.3,
    -5.2,
    -3.7,
    -2.6,
    -1.7,
    -1.2,
    -0.8,
    -0.4,
    -0.1,
    0.1,
    0.4,
    0.8,
    1.2,
    1.7,
    2.6,
    3.7,
    5.2,
    7.3,
    12.0,
)
STEPS = 50
"""How often an interval is halved: enough for the last bit of a float64."""

MOST = 4
"""Boundaries that are tried, the first ones from below."""

NICE = 1e-9
"""A boundary this near to a number of few digits is that number."""


def boundaries(function: Callable[[float], float]) -> list[float]:
    """The points at which a function of one number jumps, as far as a coarse grid shows them.

    Args:
        function: What a derivative, or a result, is at a point.

    Example:
        >>> boundaries(lambda x: 1.0 if x > 0.25 else 0.0)
        [0.25]
    """
    values = [function(point) for point in GRID]
    found: list[float] = []
    for (low, below), (high, above) in pairwise(zip(GRID, values, strict=True)):
        point = _jump(function, low, below, high, above)
        if point is not None and len(found) < MOST:
            found.append(point)
    return found


def _jump(
    function: Callable[[float], float], low: float, below: float, high: float, above: float
) -> float | None:
    """The point between two others at which a function jumps; None where it changes smoothly."""
    if not (math.isfinite(below) and math.isfinite(above)):
        return None
    first = abs(above - below)
    if first <= 1e-9 * max(abs(above), abs(below)):
        return None
    for _ in range(STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        value = function(middle)
        if not math.isfinite(value):
            return None
        if abs(value - below) > abs(above - value):
            high, above = middle, value
        else:
            low, below = middle, value
        if abs(above - below) < 1e-3 * first:
            return None
    nice = float(f"{high:.6g}")
    return nice if abs(nice - high) <= NICE * max(1.0, abs(high)) else high
