"""Right results of a function in float64, with a tolerance from each dtype and the conditioning.

The truth `t` is the reference, run in float64 on the inputs after they were rounded to the dtype under test.
The *rounding unit* of an element is the effect of rounding every input once, plus one rounding of the
element:

    unit[i] = u |t[i]| + s[i],   u = half of the dtype's eps,

where `s[i]` is the change of `t[i]` when each input is scaled by 1 + u or 1 - u (the largest of a few random
choices of signs: D. S. Parker, "Monte Carlo Arithmetic", 1997). An element is right if

    |got[i] - t[i]|  <=  (2 k + 8 + 2 sqrt(n)) unit[i],

where `n` is the number of input elements that the result element depends on, and `k` is the error of the
reference itself in that dtype, in the same units.

- 8: a library function may err by 4 units in the last place.
- 2 sqrt(n): summing n terms in the dtype itself, one after the other, errs by sqrt(n) / 2 units in the root
  mean square, since rounding errors behave as if independent (N. J. Higham and T. Mary, "A new approach to
  probabilistic rounding error analysis", SIAM J. Sci. Comput., 2019); the bound is four times as large.
- 2 k: a kernel may order its operations differently from the reference, and need not be more exact.

An element is not judged in a dtype in which the reference loses more than half of its digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import dense
from opsmith.checking.numerics.compare import (
    Difference,
    all_close,
    exact_difference,
    largest_magnitude,
    worst_difference,
)
from opsmith.checking.numerics.directional import coordinates
from opsmith.checking.samples.perturb import perturbed
from opsmith.checking.samples.sample import is_inexact, replica
from opsmith.core.cached_property import cached_property

LIBRARY = 8
"""Rounding units that a library function may err by."""
SUMMATION = 2
"""Rounding units per square root of the number of summands."""
DRAWS = 4
"""Number of random perturbations."""
PROBES = 3
"""Number of result elements whose dependence is counted."""

Function = Callable[[list[Any]], Sequence[Tensor | None]]


@dataclass(frozen=True)
class Conditioning:
    """Sensitivity of results to their inputs, independent of the dtype.

    Args:
        sensitivity: For each result the change of each element per unit of relative change of the inputs.
        accumulated: For each result the number of input elements that one of its elements depends on.
    """

    sensitivity: tuple[Tensor | None, ...]
    accumulated: tuple[int, ...]

    @classmethod
    def unknown(cls, flat: Sequence[Any], count: int) -> Conditioning:
        """Conditioning of a function without a truth in float64: only the sizes of its inputs are known."""
        largest = _largest([value for value in flat if is_inexact(value)])
        return cls((None,) * count, (largest,) * count)


def conditioning(
    function: Function, flat: list[Any], truth: Sequence[Tensor | None], generator: torch.Generator
) -> Conditioning:
    """Measure the conditioning, by running a float64 function on perturbed inputs.

    Args:
        function: Function of flat arguments.
        flat: Arguments, floating ones in float64.
        truth: Results of the function for them.
        generator: Source of the signs.
    """
    step = _step(truth)
    moves = farthest_moves(function, flat, truth, step, DRAWS, generator)
    accumulated = tuple(fan_in(function, flat, position) for position in range(len(truth)))
    return Conditioning(tuple(None if each is None else each / step for each in moves), accumulated)


def farthest_moves(
    function: Function,
    flat: list[Any],
    truth: Sequence[Tensor | None],
    step: float,
    draws: int,
    generator: torch.Generator,
) -> list[Tensor | None]:
    """Measure how far each floating result moves when its inputs are perturbed.

    Args:
        function: Takes flat arguments.
        flat: Arguments, in float64.
        truth: Its results for them.
        step: Relative perturbation.
        draws: Number of random perturbations.
        generator: Source of the signs.
    """
    moves = [torch.zeros_like(t).abs() if t is not None and is_inexact(t) else None for t in truth]
    for _ in range(draws):
        for position, other in enumerate(function([perturbed(value, step, generator) for value in flat])):
            known, result = moves[position], truth[position]
            if known is None or other is None or result is None:
                continue
            if other.shape != result.shape:
                moves[position] = torch.full_like(known, torch.inf)  # another shape: nothing is judged there
            else:
                far = (other.detach() - result).abs().nan_to_num(0.0, 0.0, 0.0)
                moves[position] = torch.maximum(known, far)
    return moves


def is_noise(
    function: Function, flat: list[Any], got: Tensor, expected: Tensor, generator: torch.Generator
) -> bool:
    """True if two answers are as close as a function's, when its inputs move by their last digit.

    What is zero but for rounding, as the gradient of a norm of one element, has no digits to compare.

    Args:
        function: Takes flat arguments in float64, and gives either answer as its only result.
        flat: Its arguments.
        got: One answer.
        expected: The other one.
        generator: Source of the signs.

    Example:
        >>> three = [torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)]
        >>> total = lambda flat: [flat[0].sum()]
        >>> is_noise(total, three, torch.tensor(0.0), total(three)[0], torch.Generator().manual_seed(0))
        True
    """
    if got.shape != expected.shape or not bool((got.isfinite() & expected.isfinite()).all()):
        return False
    step, unmoved = torch.finfo(torch.float64).eps, function([replica(value) for value in flat])
    (moves,) = farthest_moves(function, flat, unmoved, step, DRAWS, generator)
    bound = 0.0 if moves is None else allowed_roundings(1) * largest_magnitude(moves)
    return all_close(got, expected, bound)


def _step(truth: Sequence[Tensor | None]) -> float:
    """Choose the relative perturbation: half of the digits that the function computes in.

    A smaller one would drown in the function's own rounding. Most functions compute in float64; others are
    detected by their results.
    """
    numbers = [coordinates(each).nan_to_num() for each in truth if each is not None and is_inexact(each)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if numbers and all(torch.equal(each.to(dtype).to(each.dtype), each) for each in numbers):
            return math.sqrt(torch.finfo(dtype).eps)
    return math.sqrt(torch.finfo(torch.float64).eps)


def fan_in(function: Function, flat: list[Any], position: int) -> int:
    """Count the input elements that one element of a result depends on: the largest of a few elements.

    Without autograd, as for an opaque function, it is the size of the largest input.
    """
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() if is_inexact(value) else value for value in flat]
        inputs = [leaf for leaf in leaves if is_inexact(leaf)]
        try:
            result = function(leaves)[position]
            if result is None or not result.requires_grad or not result.numel():
                return _largest(inputs)
            indices = sorted({0, result.numel() // 2, result.numel() - 1})[:PROBES]
            real = torch.view_as_real(result.resolve_conj()).sum(-1) if result.is_complex() else result
            return max(1, *(_reached(real.flatten()[index], inputs) for index in indices))
        except RuntimeError as error:
            refuse_own(error)
            return _largest(inputs)


@dataclass(frozen=True)
class RoundingBound:
    """Bound of one result.

    Args:
        truth: Right values, in float64 where there is a truth in float64.
        unit: Rounding unit of each element.
        own_error: Error of the reference itself in the dtype under test, in units.
        accumulated: Number of input elements that each element depends on.
        judged: Mask of the elements that are judged. In the others the reference itself overflows in this
            dtype, or loses half of its digits, as next to a jump.
    """

    truth: Tensor
    unit: Tensor
    own_error: float
    accumulated: int
    judged: Tensor

    @property
    def allowed(self) -> float:
        """Number of units that an element may be off."""
        return 2 * self.own_error + allowed_roundings(self.accumulated)

    def judge(self, got: Tensor) -> Difference | None:
        """Find the worst element of a result, if it is further from the truth than allowed."""
        return worst_difference(got, self.truth, self.unit, self.allowed, self.judged)


def rounding_bound(
    truth: Tensor, ordinary: Tensor | None, dtype: torch.dtype, sensitivity: Tensor | None, accumulated: int
) -> RoundingBound:
    """Compute the bound of one floating result.

    Args:
        truth: Right result, in float64 or complex128.
        ordinary: The reference's result in the dtype under test, if that is not the truth itself.
        dtype: dtype under test.
        sensitivity: From `conditioning`; None where there is no truth in float64.
        accumulated: From `conditioning`.
    """
    coarse = max(unit_roundoff(dtype), unit_roundoff(ordinary.dtype) if ordinary is not None else 0.0)
    size = truth.abs()
    if sensitivity is not None:
        size = size + sensitivity.to(size.device)
    elif size.numel():  # cancellation is unknown: the largest element stands for the terms
        size = size.max().expand(size.shape)
    underflow = max(torch.finfo(dtype).tiny * coarse, torch.finfo(torch.float64).tiny)
    unit = coarse * size + underflow
    judged = torch.ones_like(unit, dtype=torch.bool)
    own_error = 0.0
    if ordinary is not None and ordinary.shape != truth.shape:
        judged = ~judged  # rounding changes its shape
    elif ordinary is not None:
        error = (ordinary.to(truth.dtype) - truth).abs()
        noise_floor = (
            torch.finfo(dtype).eps ** 0.5 * size.nan_to_num(0.0, 0.0, 0.0).max() if size.numel() else 0.0
        )
        judged = ~(error > noise_floor) & (ordinary.isfinite() | ~truth.isfinite())
        measured = (error / unit)[judged & truth.isfinite()]
        own_error = float(measured.max()) if measured.numel() else 0.0
    return RoundingBound(truth, unit, own_error, accumulated, judged)


def allowed_roundings(summands: int) -> float:
    """Return the number of rounding units that a right computation with so many summands may err by."""
    return LIBRARY + SUMMATION * math.sqrt(summands)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half of the dtype's eps: the largest relative error of one rounding."""
    return float(torch.finfo(dtype).eps) / 2


def neighbours(flat: Sequence[Any], generator: torch.Generator) -> Iterator[list[Any]]:
    """Yield some arguments, then perturbed ones that round differently."""
    yield list(flat)
    for _ in range(DRAWS - 1):
        yield [perturbed(value, 2.0**-10, generator) for value in flat]


def _reached(element: Tensor, inputs: list[Tensor]) -> int:
    found = dense(torch.autograd.grad(element, inputs, retain_graph=True, allow_unused=True))
    return sum(int(gradient.count_nonzero()) for gradient in found if gradient is not None)


def _largest(inputs: list[Tensor]) -> int:
    return max((tensor.numel() for tensor in inputs), default=1)


@dataclass(frozen=True)
class Truth:
    """The right results for some arguments in some dtype.

    Args:
        ordinary: Results of the function itself in that dtype: their metadata, and exact values where a
            result is integer or boolean.
        right: Results in float64 on the CPU, exact ones too, since rounding may change an `argmax`.
        bounds: Bound of each floating result.
    """

    ordinary: tuple[Tensor | None, ...]
    right: tuple[Tensor | None, ...]
    bounds: tuple[RoundingBound | None, ...]

    def judge(self, position: int, got: Tensor) -> Difference | None:
        """Find the worst element of a result, if it is wrong; its shape must be right."""
        bound = self.bounds[position]
        if bound is not None:
            return bound.judge(got.cpu())
        ordinary, right = self.ordinary[position], self.right[position]
        assert ordinary is not None
        assert right is not None
        return exact_difference(got, ordinary, right)


@dataclass(frozen=True)
class MeasuredFunction:
    """A function with the measured rounding error of a sample, which gives the truth in each dtype.

    Args:
        function: Function of flat arguments; some of its results may be None.
        conditioning: Sensitivity of its results to its inputs.
        own_errors: Error of the function itself in float32, in rounding units; the same number holds in
            float64.
        has_truth: True if a run in float64 is a better answer than one in the dtype itself.
    """

    function: Function
    conditioning: Conditioning
    own_errors: tuple[float, ...]
    has_truth: bool

    @classmethod
    def of(
        cls, function: Function, flat: Sequence[Any], generator: torch.Generator, *, has_truth: bool
    ) -> MeasuredFunction:
        """Measure a function on these arguments."""
        wide = in_double_on_cpu(flat)
        results = function(wide)
        blank = (0.0,) * len(results)
        if not has_truth:
            return cls(function, Conditioning.unknown(flat, len(results)), blank, False)
        measure = cls(function, conditioning(function, wide, results, generator), blank, True)
        errors = blank
        try:
            for near in neighbours(wide, generator):
                in_float32 = measure.truth([replica(value, torch.float32) for value in near], torch.float32)
                found = [b.own_error if b else 0.0 for b in in_float32.bounds]
                errors = tuple(max(pair) for pair in zip(errors, found, strict=True))
        except (RuntimeError, TypeError, ValueError) as error:
            refuse_own(error)  # the property reports that it does not run in float32
            return measure
        return replace(measure, own_errors=errors)

    def truth(self, flat: Sequence[Any], dtype: torch.dtype) -> Truth:
        """Compute the right results for these arguments, given in this dtype."""
        ordinary = tuple(self.function(list(flat)))
        right = (
            tuple(self.function(in_double_on_cpu(flat))) if self.has_truth else tuple(map(_on_cpu, ordinary))
        )
        bounds = tuple(self._bound(position, ordinary, right, dtype) for position in range(len(right)))
        return Truth(ordinary, right, bounds)

    def _bound(
        self,
        position: int,
        ordinary: Sequence[Tensor | None],
        right: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> RoundingBound | None:
        result, value = ordinary[position], right[position]
        if result is None or value is None or not is_inexact(value):
            return None
        found = rounding_bound(
            replica(value, torch.float64),
            result.detach().cpu() if self.has_truth else None,
            dtype,
            self.conditioning.sensitivity[position],
            self.conditioning.accumulated[position],
        )
        return replace(found, own_error=max(found.own_error, self.own_errors[position]))


ROUNDED_DRAWS = 3
"""Number of random perturbations by the rounding of a dtype."""


@dataclass(frozen=True)
class RoundedFunction:
    """A function whose arguments and intermediate values are rounded to a dtype, with bounds of its results.

    Args:
        function: Takes flat arguments.
        flat: Arguments, in float32.
        dtype: dtype to round to.
        generator: Source of perturbations.
        has_truth: True if a run in float64 is closer to the truth.
    """

    function: Function
    flat: list[Any]
    dtype: torch.dtype
    generator: torch.Generator
    has_truth: bool

    def judge(self, position: int, got: Tensor) -> Difference | None:
        """The worst element, if rounding to the dtype does not explain it."""
        bound = self._bounds[position]
        if bound is None or got.shape != bound.truth.shape:
            return None
        return bound.judge(got.detach().cpu())

    @cached_property
    def _bounds(self) -> list[RoundingBound | None]:
        measure = MeasuredFunction.of(self.function, self.flat, self.generator, has_truth=self.has_truth)
        bounds = measure.truth(self.flat, self.dtype).bounds
        truth, wide = (
            [None if bound is None else bound.truth for bound in bounds],
            in_double_on_cpu(self.flat),
        )
        step = unit_roundoff(self.dtype)
        moves = farthest_moves(self.function, wide, truth, step, ROUNDED_DRAWS, self.generator)
        return [
            None if bound is None or move is None else replace(bound, unit=bound.unit + move)
            for bound, move in zip(bounds, moves, strict=True)
        ]


def in_double_on_cpu(flat: Sequence[Any]) -> list[Any]:
    """Return the arguments on the CPU, floating tensors in float64 and complex ones in complex128."""
    return [replica(value, torch.float64, torch.device("cpu")) for value in flat]


def _on_cpu(result: Tensor | None) -> Tensor | None:
    return None if result is None else result.detach().cpu()
