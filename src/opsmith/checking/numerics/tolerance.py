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

A function may compute in float32 whatever it is given. Then `u` is that of float32 in float64, too, and
`unit` includes the noise of the element: all of it may be rounding, as of a gradient that is zero. What a
function computes in, and the noise, are measured (`working_precision`), not declared.

An element is not judged in a dtype in which the reference loses more than half of its digits.

`s` and `k` take many runs of the reference. A result within `8 u |t|` everywhere is right whatever they are,
and most are: they are measured for the others alone.
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
    same_bits,
    worst_difference,
)
from opsmith.checking.numerics.directional import coordinates
from opsmith.checking.numerics.working_precision import FLOAT64, WorkingPrecision, working_precision
from opsmith.checking.samples.perturb import perturbed
from opsmith.checking.samples.sample import is_inexact, replica
from opsmith.core.cached_property import cached_property

LIBRARY = 8
"""Rounding units that a library function may err by."""
FEW_DIGITS = (torch.bfloat16, torch.float16)
"""dtypes in which the error of the reference says nothing."""
MOVES = 16
"""Number of moves by the last digit of such a dtype: of four all are alike once in a hundred times."""
SUMMATION = 2
"""Rounding units per square root of the number of summands."""
DRAWS = 4
"""Number of random perturbations."""
PROBES = 3
"""Number of result elements whose dependence is counted."""

Function = Callable[[list[Any]], Sequence[Tensor | None]]


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
    truth: Tensor,
    ordinary: Tensor | None,
    dtype: torch.dtype,
    sensitivity: Tensor | None,
    accumulated: int,
    noise: Tensor | None = None,
    jumps: Tensor | None = None,
) -> RoundingBound:
    """Compute the bound of one floating result.

    Args:
        truth: Right result, in float64 or complex128.
        ordinary: The reference's result in the dtype under test, if that is not the truth itself.
        dtype: dtype under test, or the coarser one that is computed in.
        sensitivity: As of `MeasuredFunction`; None where there is no truth in float64.
        accumulated: As of `MeasuredFunction`.
        noise: Measured rounding error of each element in that.
        jumps: Mask of the elements that are not judged in a dtype of few digits.
    """
    coarse = max(unit_roundoff(dtype), unit_roundoff(ordinary.dtype) if ordinary is not None else 0.0)
    size = truth.abs()
    if sensitivity is not None:
        size = size + sensitivity.to(size.device)
    elif size.numel():  # cancellation is unknown: the largest element stands for the terms
        size = size.max().expand(size.shape)
    underflow = max(torch.finfo(dtype).tiny * coarse, torch.finfo(torch.float64).tiny)
    unit = coarse * size + underflow
    if noise is not None and noise.shape == unit.shape:
        unit = unit + noise.to(unit.device)
    judged = torch.ones_like(unit, dtype=torch.bool)
    own_error = 0.0
    if ordinary is not None and ordinary.shape != truth.shape:
        judged = ~judged  # rounding changes its shape
    elif ordinary is not None and dtype in FEW_DIGITS:
        # Its error there excuses nothing: what returns zeros in bfloat16 would excuse itself.
        judged = ordinary.isfinite() | ~truth.isfinite()
        if jumps is not None and jumps.shape == judged.shape:
            judged &= ~jumps.to(judged.device)
    elif ordinary is not None:
        error = (ordinary.to(truth.dtype) - truth).abs()
        judged = _keeps_digits(ordinary, truth, dtype, size)
        measured = (error / unit)[judged & truth.isfinite()]
        own_error = float(measured.max()) if measured.numel() else 0.0
    return RoundingBound(truth, unit, own_error, accumulated, judged)


def _keeps_digits(ordinary: Tensor, truth: Tensor, dtype: torch.dtype, size: Tensor) -> Tensor:
    """Mark the elements in which the reference keeps half of its digits in a dtype.

    Args:
        ordinary: The reference's result in the dtype.
        truth: The right one.
        dtype: The dtype.
        size: Size of each element or of what moves it.
    """
    largest = size.nan_to_num(0.0, 0.0, 0.0).max() if size.numel() else 0.0
    lost = (ordinary.to(truth.dtype) - truth).abs() > torch.finfo(dtype).eps ** 0.5 * largest
    kept: Tensor = ~lost & (ordinary.isfinite() | ~truth.isfinite())
    return kept


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

    A bound costs many runs of the function. It is measured once a result is further from the truth than every
    bound allows.

    Args:
        ordinary: Results of the function itself in that dtype: their metadata, and exact values where a
            result is integer or boolean.
        right: Results in float64 on the CPU, exact ones too, since rounding may change an `argmax`.
        dtype: The dtype.
        measure: The function, which measures the bounds.
    """

    ordinary: tuple[Tensor | None, ...]
    right: tuple[Tensor | None, ...]
    dtype: torch.dtype
    measure: MeasuredFunction

    @cached_property
    def bounds(self) -> tuple[RoundingBound | None, ...]:
        """Bound of each floating result."""
        return self.measure.bounds(self.ordinary, self.right, self.dtype)

    def judge(self, position: int, got: Tensor) -> Difference | None:
        """Find the worst element of a result, if it is wrong; its shape must be right."""
        ordinary, right = self.ordinary[position], self.right[position]
        if ordinary is None or right is None or not is_inexact(right):
            assert ordinary is not None
            assert right is not None
            return exact_difference(got, ordinary, right)
        if within_every_bound(got.detach().cpu(), right.detach(), self.dtype):
            return None
        bound = self.bounds[position]
        assert bound is not None
        return bound.judge(got.cpu())

    def is_judged(self, position: int) -> bool:
        """True if at least one element of a result is judged, or it has none."""
        ordinary, right = self.ordinary[position], self.right[position]
        if ordinary is None or right is None or not is_inexact(right) or not right.numel():
            return True
        if ordinary.shape == right.shape:
            truth = right.detach().to(torch.complex128 if right.is_complex() else torch.float64)
            # Their sensitivity makes sizes larger, and more elements judged.
            if _keeps_digits(ordinary.detach().cpu(), truth, self.dtype, truth.abs()).any():
                return True
        bound = self.bounds[position]
        return bound is None or bool(bound.judged.any())


def within_every_bound(got: Tensor, truth: Tensor, dtype: torch.dtype) -> bool:
    """True if every element is within the bound that a perfectly conditioned function would have.

    Args:
        got: A result, on the CPU.
        truth: The right one.
        dtype: dtype under test.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> [within_every_bound(one * (1 + far), one, torch.float32) for far in (1e-7, 1e-5)]
        [True, False]
    """
    wide = torch.complex128 if truth.is_complex() else torch.float64
    right = truth.to(wide)
    return all_close(got.to(wide), right, right.abs() * (LIBRARY * unit_roundoff(dtype)))


@dataclass(frozen=True)
class MeasuredFunction:
    """A function with the measured rounding error of a sample, which gives the truth in each dtype.

    Args:
        function: Function of flat arguments; some of its results may be None.
        wide: The arguments of the sample, floating ones in float64.
        results: Results of the function for them.
        generator: Source of perturbations.
        has_truth: True if a run in float64 is a better answer than one in the dtype itself.
        computed_in: Gives the dtype that it computes in, where more than it shows that; else it is measured.
    """

    function: Function
    wide: Sequence[Any]
    results: tuple[Tensor | None, ...]
    generator: torch.Generator
    has_truth: bool
    computed_in: Callable[[], torch.dtype] | None = None

    @classmethod
    def of(
        cls,
        function: Function,
        flat: Sequence[Any],
        generator: torch.Generator,
        *,
        has_truth: bool,
        computed_in: Callable[[], torch.dtype] | None = None,
    ) -> MeasuredFunction:
        """Run a function on these arguments, to measure it where a result asks for it."""
        wide = in_double_on_cpu(flat)
        results = tuple(function(wide))
        return cls(function, wide, results, generator, has_truth, computed_in)

    @cached_property
    def sensitivity(self) -> tuple[Tensor | None, ...]:
        """For each result the change of each element per unit of relative change of the inputs."""
        if not self.has_truth:
            return (None,) * len(self.results)
        step = max(_step(self.results), math.sqrt(torch.finfo(self.precision.dtype).eps))
        moves = farthest_moves(self.function, [*self.wide], self.results, step, DRAWS, self.generator)
        return tuple(None if each is None else each / step for each in moves)

    def jumps(self, dtype: torch.dtype) -> Sequence[Tensor | None]:
        """Mask of the elements that move by more than half of the digits with the last one of the inputs.

        It is None in a dtype that is not one of few digits.
        """
        if dtype not in FEW_DIGITS or not self.has_truth:
            return (None,) * len(self.results)
        if dtype not in self._jumps:
            eps = torch.finfo(dtype).eps
            moves = farthest_moves(
                self.function, [*self.wide], self.results, eps, MOVES, self._own_generator()
            )
            self._jumps[dtype] = [
                None if move is None or result is None else move > eps**0.5 * largest_magnitude(result)
                for move, result in zip(moves, self.results, strict=True)
            ]
        return self._jumps[dtype]

    @cached_property
    def _jumps(self) -> dict[torch.dtype, list[Tensor | None]]:
        return {}

    @cached_property
    def accumulated(self) -> tuple[int, ...]:
        """For each result the number of input elements that one of its elements depends on, at most."""
        if not self.has_truth:
            return (_largest([value for value in self.wide if is_inexact(value)]),) * len(self.results)
        return tuple(fan_in(self.function, [*self.wide], position) for position in range(len(self.results)))

    @cached_property
    def own_errors(self) -> tuple[float, ...]:
        """Error of the function itself in float32, in rounding units; the same number holds in float64."""
        errors = blank = (0.0,) * len(self.results)
        if not self.has_truth:
            return blank
        try:
            for near in neighbours(self.wide, self.generator):
                narrow = [replica(value, torch.float32) for value in near]
                bounds = self.bounds(self.function(narrow), self._in_double(narrow), torch.float32, blank)
                found = [bound.own_error if bound else 0.0 for bound in bounds]
                errors = tuple(map(max, errors, found))
        except (RuntimeError, TypeError, ValueError) as error:
            refuse_own(error)  # the property reports that it does not run in float32
            return blank
        return errors

    @cached_property
    def precision(self) -> WorkingPrecision:
        """The precision that it computes in for arguments in float64."""
        try:
            known = torch.float64 if self.computed_in is None else self.computed_in()
            return working_precision(self.function, self.wide, self._own_generator(), known)
        except (RuntimeError, TypeError, ValueError) as error:
            refuse_own(error)  # as it may where arguments must be whole
            return FLOAT64

    def _own_generator(self) -> torch.Generator:
        """A generator that leaves the draws of `generator` as they are."""
        return torch.Generator().manual_seed(self.generator.initial_seed())

    def truth(self, flat: Sequence[Any], dtype: torch.dtype) -> Truth:
        """Compute the right results for these arguments, given in this dtype."""
        if self.has_truth and self._is_sample(flat):
            return Truth(self.results, self.results, dtype, self)
        ordinary = tuple(self.function(list(flat)))
        right = self._in_double(flat) if self.has_truth else tuple(map(_on_cpu, ordinary))
        return Truth(ordinary, right, dtype, self)

    def _in_double(self, flat: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The results in float64; those of the sample itself are known."""
        wide = in_double_on_cpu(flat)
        return self.results if self._is_sample(wide) else tuple(self.function(wide))

    def _is_sample(self, flat: Sequence[Any]) -> bool:
        """True if arguments are those of the sample in float64, bit for bit."""
        return all(map(_same_argument, flat, self.wide))

    def bounds(
        self,
        ordinary: Sequence[Tensor | None],
        right: Sequence[Tensor | None],
        dtype: torch.dtype,
        own_errors: Sequence[float] | None = None,
    ) -> tuple[RoundingBound | None, ...]:
        """Measure the bound of each floating result.

        Args:
            ordinary: Results of the function in a dtype.
            right: Results in float64.
            dtype: The dtype.
            own_errors: Errors of the function itself that its bounds allow at least; measured by default.
        """
        errors = self.own_errors if own_errors is None else own_errors
        bounds: list[RoundingBound | None] = []
        single = dtype == torch.float64 and self.precision.dtype == torch.float32
        for position, (result, value) in enumerate(zip(ordinary, right, strict=True)):
            if result is None or value is None or not is_inexact(value):
                bounds.append(None)
                continue
            found = rounding_bound(
                replica(value, torch.float64),
                result.detach().cpu() if self.has_truth else None,
                torch.float32 if single else dtype,
                self.sensitivity[position],
                self.accumulated[position],
                self.precision.noise[position] if single else None,
                self.jumps(dtype)[position],
            )
            bounds.append(replace(found, own_error=max(found.own_error, errors[position])))
        return tuple(bounds)


def _same_argument(one: Any, other: Any) -> bool:
    """True if two arguments are the same: tensors bit for bit, and everything else by identity."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.stride() == other.stride() and same_bits(one, other)
    return one is other


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
        truth = [None if bound is None else bound.truth for bound in bounds]
        wide, step = in_double_on_cpu(self.flat), unit_roundoff(self.dtype)
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
