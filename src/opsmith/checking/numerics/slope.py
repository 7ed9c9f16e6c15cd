"""The derivative of a function of one number, from differences, with how far it may be off.

Each step `h` gives central differences at `h` and `h / 2`, one Richardson extrapolation of both (L. F.
Richardson, "The approximate arithmetical solution by finite differences", 1911), and an error bound of three
parts:

- twice what the finer difference changed, which holds as well where the derivative itself has a kink;
- half of the kink that both sides show: `(f(x + h) - 2 f(x) + f(x - h)) / h` halves with `h` where the
  function is smooth, and stays, or grows, where its one-sided derivatives differ, or where it is steeper than
  `h` resolves: a step at which it does not halve says nothing;
- the noise of the function over the step.

Steps are tried until the bound is small; the one with the least bound is taken that no finer one contradicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NOISES = 3
"""How many times the noise a difference may be off: the noise is measured as the largest of some twenty."""

TOLD = 0.05
"""A derivative is told if it is known to this fraction of itself, or of the size that it is asked for."""

Differences = Callable[[float], tuple[float, float]]
"""A move of the argument, to how far it really moved (rounding) and how far the function moved."""


@dataclass(frozen=True, slots=True)
class Slope:
    """A derivative.

    Args:
        value: What differences say.
        error: How far from that the derivative may lie; infinite where it cannot be told.
        left: The derivative from below, where it is another one or the only one; else nan.
        right: The derivative from above, likewise.
        step: The step that it was told from.
    """

    value: float
    error: float
    left: float = math.nan
    right: float = math.nan
    step: float = math.nan

    @property
    def told(self) -> bool:
        """Whether there is a derivative, and it is known."""
        return math.isfinite(self.error)


def slope(moved: Differences, steps: Iterable[float], noise: float, size: float, goal: float) -> Slope:
    """The derivative of a function.

    Args:
        moved: The function: how far it moves from its value at the point.
        steps: Steps to try, in this order.
        noise: How far rounding moves a value of it.
        size: What counts as a derivative of ordinary size: one much smaller need not be known better.
        goal: Relative error at which no further step is tried.
    """
    found: list[_Found] = []
    sides = (_Side(), _Side())
    for step in steps:
        if not step / 2 > 0:  # below the smallest number that there is
            continue
        far, near = _quotients(moved, step), _quotients(moved, step / 2)
        if far is None or near is None:
            continue
        blur = 2 * NOISES * noise / step
        for side, outer, inner in zip(sides, far, near, strict=True):
            side.see(outer, inner, blur)
        if not all(map(math.isfinite, (*far, *near))):
            continue
        each = _extrapolated(step, far, near, blur)
        if each is None:
            continue
        found.append(each)
        if each.error <= goal * max(abs(each.value), size):
            break
    best = _best(found)
    if best is not None and best.error <= TOLD * max(abs(best.value), size):
        return Slope(best.value, best.error, step=best.step)
    return _one_sided(best, *sides, size)


@dataclass(frozen=True, slots=True)
class _Found:
    """What one step says."""

    step: float
    value: float
    error: float


def _extrapolated(
    step: float, far: tuple[float, float], near: tuple[float, float], blur: float
) -> _Found | None:
    """What one step says; None where the function has a kink, a jump or a spike at that scale."""
    coarse, fine = (far[0] + far[1]) / 2, (near[0] + near[1]) / 2
    bend, kink = abs(far[1] - far[0]), abs(2 * (near[1] - near[0]) - (far[1] - far[0]))
    if kink > max(bend / 2, 4 * blur) or abs(fine) - abs(coarse) > max(abs(coarse) / 2, 4 * blur):
        return None
    return _Found(step, (4 * fine - coarse) / 3, 2 * abs(fine - coarse) + kink / 2 + blur)


def _best(found: list[_Found]) -> _Found | None:
    """The step with the least error that no finer one contradicts."""
    for each in sorted(found, key=lambda each: each.error):
        finer = (other for other in found if other.step < each.step)
        if all(abs(other.value - each.value) <= other.error + each.error for other in finer):
            return each
    return None


def _quotients(moved: Differences, step: float) -> tuple[float, float] | None:
    """The difference quotients from below and from above; None where rounding swallows the step."""
    above, rise = moved(step)
    below, fall = moved(-step)
    if above <= 0 or below >= 0:
        return None
    return fall / below, rise / above


class _Side:
    """The best extrapolation of one-sided quotients so far."""

    def __init__(self) -> None:
        self.value, self.error = math.nan, math.inf

    def see(self, outer: float, inner: float, blur: float) -> None:
        value = 2 * inner - outer
        error = abs(value - inner) + 2 * blur
        if error < self.error:
            self.value, self.error = value, error


def _one_sided(best: _Found | None, left: _Side, right: _Side, size: float) -> Slope:
    """Where central differences do not settle: a kink, one side alone, or nothing."""
    middle = math.nan if best is None else best.value
    if left.error + right.error <= 2 * TOLD * abs(right.value - left.value):
        return Slope((left.value + right.value) / 2, math.inf, left.value, right.value)
    known = [
        side.value if side.error <= TOLD * max(abs(side.value), size) else math.nan for side in (left, right)
    ]
    if all(map(math.isfinite, known)):  # they agree, and yet it is not smooth: something else happens there
        known = [math.nan, math.nan]
    return Slope(middle, math.inf, *known)
