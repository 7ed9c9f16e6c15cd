"""Where a function changes from one piece to another, found by bisection along one of its elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

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
