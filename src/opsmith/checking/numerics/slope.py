"""The derivative of a function of one number from differences, with an error bound.

Each step `h` gives central differences at `h` and `h / 2`, one Richardson extrapolation of both (L. F.
Richardson, "The approximate arithmetical solution by finite differences", 1911), and an error bound of three
parts:

- twice the change of the finer difference, which also holds where the derivative itself has a kink;
- half of the kink between both sides: `(f(x + h) - 2 f(x) + f(x - h)) / h` halves with `h` where the
  function is smooth, and stays, or grows, where its one-sided derivatives differ, or where it is steeper than
  `h` resolves: a step at which it does not halve is ignored;
- the noise of the function over the step.

Steps are tried until the bound is small. The result is that of the least bound that no finer step
contradicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NOISES = 3
"""Factor on the noise of a difference, since the noise is measured as the largest of some twenty."""

KNOWN = 0.05
"""Largest error of a known derivative, relative to itself or to the size of interest."""

Differences = Callable[[float], tuple[float, float]]
"""Function of a step: the distance that the argument moved, after rounding, and the change of the value."""


@dataclass(frozen=True, slots=True)
class Slope:
    """A derivative.

    Args:
        value: Estimate from differences.
        error: Bound of its error; infinite where the derivative is unknown.
        left: Derivative from below, where it is a different one or the only one; else nan.
        right: Derivative from above, likewise.
        step: Step of the estimate.
    """

    value: float
    error: float
    left: float = math.nan
    right: float = math.nan
    step: float = math.nan

    @property
    def is_known(self) -> bool:
        """True if there is a derivative, with a finite error."""
        return math.isfinite(self.error)


def slope(moved: Differences, steps: Iterable[float], noise: float, size: float, goal: float) -> Slope:
    """Estimate the derivative of a function.

    Args:
        moved: The function: its change from the value at the point.
        steps: Steps to try, in this order.
        noise: Rounding noise of a value.
        size: Ordinary size of a derivative: one that is much smaller need not be known better.
        goal: Relative error at which no further step is tried.
    """
    found: list[Slope] = []
    sides = [(math.inf, math.nan)] * 2  # the error, and the best extrapolation of one-sided quotients
    for step in steps:
        if not step / 2 > 0:  # underflow
            continue
        far, near = _quotients(moved, step), _quotients(moved, step / 2)
        if far is None or near is None:
            continue
        blur = 2 * NOISES * noise / step
        ahead = [2 * inner - outer for outer, inner in zip(far, near, strict=True)]
        errors = [abs(value - inner) + 2 * blur for value, inner in zip(ahead, near, strict=True)]
        sides = [*map(min, sides, zip(errors, ahead, strict=True))]
        if not all(map(math.isfinite, (*far, *near))):
            continue
        each = _extrapolated(step, far, near, blur)
        if each is None:
            continue
        found.append(each)
        if each.error <= goal * max(abs(each.value), size):
            break
    best = _best(found)
    if best is not None and best.error <= KNOWN * max(abs(best.value), size):
        return best
    return _one_sided(math.nan if best is None else best.value, *sides, size)


def _extrapolated(
    step: float, far: tuple[float, float], near: tuple[float, float], blur: float
) -> Slope | None:
    """Extrapolate one step; None where the function has a kink, jump or spike at that scale."""
    coarse, fine = (far[0] + far[1]) / 2, (near[0] + near[1]) / 2
    bend, kink = abs(far[1] - far[0]), abs(2 * (near[1] - near[0]) - (far[1] - far[0]))
    if kink > max(bend / 2, 4 * blur) or abs(fine) - abs(coarse) > max(abs(coarse) / 2, 4 * blur):
        return None
    return Slope((4 * fine - coarse) / 3, 2 * abs(fine - coarse) + kink / 2 + blur, step=step)


def _best(found: list[Slope]) -> Slope | None:
    """Return the estimate of least error that no finer step contradicts."""
    for each in sorted(found, key=lambda each: each.error):
        finer = (other for other in found if other.step < each.step)
        if all(abs(other.value - each.value) <= other.error + each.error for other in finer):
            return each
    return None


def _quotients(moved: Differences, step: float) -> tuple[float, float] | None:
    """Compute the difference quotients from below and from above; None where the step is lost in rounding."""
    above, rise = moved(step)
    below, fall = moved(-step)
    if above <= 0 or below >= 0:
        return None
    return fall / below, rise / above


def _one_sided(middle: float, left: tuple[float, float], right: tuple[float, float], size: float) -> Slope:
    """Handle what central differences do not settle: a kink, one side alone, or nothing.

    Args:
        middle: The best estimate from both sides, if there is one.
        left: Error and derivative from below.
        right: Error and derivative from above.
        size: Ordinary size of a derivative.
    """
    if left[0] + right[0] <= 2 * KNOWN * abs(right[1] - left[1]):
        return Slope((left[1] + right[1]) / 2, math.inf, left[1], right[1])
    known = [value if error <= KNOWN * max(abs(value), size) else math.nan for error, value in (left, right)]
    if all(map(math.isfinite, known)):  # both agree where the function is not smooth: neither is trusted
        known = [math.nan, math.nan]
    return Slope(middle, math.inf, *known)
