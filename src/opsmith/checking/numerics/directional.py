"""Directional function: the change of weighted results when one argument moves, and its derivative.

Each step `h` gives central differences at `h` and `h / 2`, one Richardson extrapolation of both (L. F.
Richardson, "The approximate arithmetical solution by finite differences", 1911), and an error bound of three
parts:

- twice the change of the finer difference, which is also valid if the derivative itself has a kink;
- half of the kink between both sides. `(f(x + h) - 2 f(x) + f(x - h)) / h` halves with `h` if the function is
  smooth. It does not shrink if the one-sided derivatives differ, or if the function is steeper than `h`
  resolves. A step at which it does not halve is ignored;
- the noise of the function over the step.

Steps are tried until the bound is small. The result is the estimate with the smallest bound that no finer
step contradicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.autodiff import Results
from opsmith.core.cached_property import cached_property
from opsmith.judging.tensors import is_inexact


@dataclass(frozen=True)
class PackedTensors:
    """The values of a list at `argnums`, packed into one row of numbers; a complex number becomes a pair."""

    values: Sequence[Any]
    argnums: tuple[int, ...]

    @cached_property
    def row(self) -> Tensor:
        """The packed numbers."""
        return torch.cat([coordinates(self.values[argnum]) for argnum in self.argnums])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of numbers of each packed value."""
        return tuple(coordinates(self.values[argnum]).numel() for argnum in self.argnums)

    def unpacked(self, row: Tensor) -> list[Any]:
        """Return the values, with the packed values taken from a row."""
        values = list(self.values)
        for argnum, piece in zip(self.argnums, row.split(self.sizes), strict=True):
            like = values[argnum]
            own = piece.clone()  # a slice of a row would have an offset into its memory
            shaped = torch.view_as_complex(own.view(-1, 2)) if like.is_complex() else own
            values[argnum] = shaped.view(like.shape)
        return values

    def locate(self, position: int) -> tuple[int, int]:
        """Return the position of the value that contains a number of the row, and the index in this value."""
        sizes = zip(self.argnums, self.sizes, strict=True)
        return [(argnum, at) for argnum, size in sizes for at in range(size)][position]


class DirectionalFunction:
    """Results of a function times their grad_outputs, element by element, as one argument moves.

    Complex numbers are pairs of real numbers here, so that a *coordinate* is an element, or one part of it.
    The sum of the weighted results is the loss whose gradient torch's backward computes. Results are
    subtracted before they are summed, so that results that do not depend on a coordinate cancel exactly.

    Args:
        function: Function of flat arguments.
        flat: Arguments.
        argnum: Position of the argument that moves.
        grads: grad_output of each result; None for a result without one.
    """

    def __init__(
        self, function: Results, flat: Sequence[Any], argnum: int, grads: Sequence[Tensor | None]
    ) -> None:
        self._function, self._packed, self._grads = function, PackedTensors(list(flat), (argnum,)), grads
        self._numbers = self._packed.row
        self.coordinates = self._numbers.double()
        compared = [
            (
                position,
                coordinates(result).double(),
                coordinates(grad.to(result.device, wide(result))),
                result.dtype,
            )
            for position, (grad, result) in enumerate(zip(grads, self._results(self._numbers), strict=True))
            if grad is not None and result is not None and is_inexact(result)
        ]
        self._compared = [position for position, *_ in compared]
        self._counts = [value.numel() for _, value, _, _ in compared]
        self._values = _joined([value for _, value, _, _ in compared])
        self._weights = _joined([weight for _, _, weight, _ in compared])
        self._steady = bool(self._values.isfinite().all())
        self.has_nan = bool(self._values.isnan().any())
        """True if a result is nan at the point itself, so that nan flows into gradients."""
        self.weighed = (self._values * self._weights).nan_to_num(0.0, 0.0, 0.0)
        """Weighted results at the point itself; 0 where they are not finite."""
        self.rounding = _joined(
            [torch.full_like(v, torch.finfo(dtype).eps / 2) for _, v, _, dtype in compared]
        )
        """Half of the eps of each weighted result's dtype."""
        self.unit = float(torch.finfo(self._numbers.dtype).eps) / 2
        sizes = flat[argnum].detach().abs().double().reshape(-1).nan_to_num(0.0, 0.0, 0.0)
        self.sizes = sizes.repeat_interleave(2) if flat[argnum].is_complex() else sizes
        """Absolute value of each coordinate's element; 0 where it is not finite."""

    @cached_property
    def usual(self) -> float:
        """Typical size of the argument's elements: the median without tiny elements; 1 if all are tiny."""
        present = self.sizes[self.sizes > torch.finfo(self._numbers.dtype).tiny ** 0.5]
        return float(present.median()) if present.numel() else 1.0

    def direction(self, generator: torch.Generator) -> Tensor:
        """Draw a move of every coordinate by its element's size, or by the usual size if that is 0."""
        sizes = torch.where(self.sizes > 0, self.sizes, self.usual)
        return sizes * (torch.randint(0, 2, sizes.shape, generator=generator, dtype=torch.float64) * 2 - 1)

    def along(self, direction: Tensor, step: float) -> Tensor:
        """Compute the change of each weighted result if every coordinate moves by its own step."""
        return self._moved((self.coordinates + step * direction).to(self._numbers.dtype))

    def at(self, coordinate: int, step: float) -> tuple[float, Tensor]:
        """Move a coordinate: the distance after rounding, and the change of each weighted result."""
        moved = self._numbers.clone()
        moved[coordinate] += step
        return float(moved[coordinate].double() - self.coordinates[coordinate]), self._moved(moved)

    def central(self, coordinate: int, step: float) -> tuple[float, Tensor]:
        """Compute the central quotient by a coordinate (nan if the step is lost), and mask changes."""
        (rise, above), (fall, below) = (self.at(coordinate, side * step) for side in (1, -1))
        quotient = float((above - below).sum()) / (rise - fall) if rise > fall else math.nan
        return quotient, (above != 0) | (below != 0)

    def shifted(self, by: Tensor) -> DirectionalFunction:
        """Return the same function at another point."""
        flat = self._packed.unpacked((self.coordinates + by).to(self._numbers.dtype))
        (argnum,) = self._packed.argnums
        return DirectionalFunction(self._function, flat, argnum, self._grads)

    def _moved(self, moved: Tensor) -> Tensor:
        try:
            results = self._results(moved)
        except Exception:  # outside of its domain
            return torch.full_like(self._values, torch.nan)
        numbers = [coordinates(results[position]).double() for position in self._compared]
        if [each.numel() for each in numbers] != self._counts:  # a jump, as of `x[x > 0]`
            return torch.full_like(self._values, torch.nan)
        after = _joined(numbers)
        moves = after - self._values
        if not self._steady:  # an unchanged inf or nan has no change
            moves[(after == self._values) | (after.isnan() & self._values.isnan())] = 0.0
        return moves * self._weights

    def _results(self, row: Tensor) -> Sequence[Any]:
        with torch.no_grad():
            return self._function(self._packed.unpacked(row))


def wide(tensor: Tensor) -> torch.dtype:
    """Return complex128 for a complex tensor, else float64."""
    return torch.complex128 if tensor.is_complex() else torch.float64


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors)) if tensors else torch.zeros(0, dtype=torch.float64)


def coordinates(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in a row, with complex numbers as pairs."""
    plain = tensor.detach()
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).reshape(-1)


def represents(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Return True if a floating dtype represents every number of a tensor."""
    numbers = coordinates(tensor)
    return torch.equal(numbers.to(dtype).to(numbers.dtype), numbers)


NOISES = 3
"""Factor on the noise of a difference, since the measured noise is the largest of about twenty."""

KNOWN = 0.05
"""Maximum error of a known derivative, relative to itself or to the size of interest."""

Differences = Callable[[float], tuple[float, float]]
"""Function of a step: the distance that the argument moved, after rounding, and the change of the value."""


@dataclass(frozen=True, slots=True)
class Slope:
    """A derivative.

    Args:
        value: Estimate from differences.
        error: Bound of its error; infinite where the derivative is unknown.
        left: Derivative from below, if it differs from `right` or is the only derivative; else nan.
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
        size: Ordinary size of a derivative; a much smaller derivative need not be known more exactly.
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
    return _one_sided(math.nan if best is None else best.value, sides[0], sides[1], size)


def _extrapolated(
    step: float, far: tuple[float, float], near: tuple[float, float], blur: float
) -> Slope | None:
    """Extrapolate one step; None if the function has a kink, jump or spike at that scale."""
    coarse, fine = (far[0] + far[1]) / 2, (near[0] + near[1]) / 2
    bend, kink = abs(far[1] - far[0]), abs(2 * (near[1] - near[0]) - (far[1] - far[0]))
    if kink > max(bend / 2, 4 * blur) or abs(fine) - abs(coarse) > max(abs(coarse) / 2, 4 * blur):
        return None
    return Slope((4 * fine - coarse) / 3, 2 * abs(fine - coarse) + kink / 2 + blur, step=step)


def _best(found: list[Slope]) -> Slope | None:
    """Return the estimate with the smallest error that no finer step contradicts."""
    for each in sorted(found, key=lambda each: each.error):
        finer = (other for other in found if other.step < each.step)
        if all(abs(other.value - each.value) <= other.error + each.error for other in finer):
            return each
    return None


def _quotients(moved: Differences, step: float) -> tuple[float, float] | None:
    """Compute the difference quotients from below and above; None if the step is lost in rounding."""
    above, rise = moved(step)
    below, fall = moved(-step)
    if above <= 0 or below >= 0:
        return None
    return fall / below, rise / above


def _one_sided(middle: float, left: tuple[float, float], right: tuple[float, float], size: float) -> Slope:
    """Return the derivative if central differences do not decide: a kink, one side only, or unknown.

    Args:
        middle: The best estimate from both sides, if there is one.
        left: Error and derivative from below.
        right: Error and derivative from above.
        size: Ordinary size of a derivative.
    """
    if left[0] + right[0] <= 2 * KNOWN * abs(right[1] - left[1]):
        return Slope((left[1] + right[1]) / 2, math.inf, left[1], right[1])
    known = [value if error <= KNOWN * max(abs(value), size) else math.nan for error, value in (left, right)]
    if all(map(math.isfinite, known)):  # both agree although the function is not smooth: neither is trusted
        known = [math.nan, math.nan]
    return Slope(middle, math.inf, *known)
