"""Gradients from finite differences, with an error for each element, to which derivatives are compared.

Agreement along a few directions decides most cases with a few calls, and needs no measured noise. A
derivative that agrees with plain differences to almost all of their digits is right. If noise, a kink or a
pole prevents this agreement, nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.autodiff import Results
from opsmith.checking.numerics.directional import (
    DirectionalFunction,
    PackedTensors,
    Slope,
    coordinates,
    slope,
)
from opsmith.checking.numerics.noise import Noise, SecondEstimate, noise_of
from opsmith.core.cached_property import cached_property
from opsmith.judging.compare import Difference, largest_magnitude, unravel
from opsmith.judging.constants import LIBRARY, allowed_roundings

GOAL = 1e-6
"""Relative error at which differences are good enough, if the noise allows it. It is not smaller, since
library functions such as `polygamma` may not be more exact."""

FINER = 8
"""Number of times that a step is divided by 8 if differences do not converge."""


@dataclass(frozen=True)
class DirectionalDerivative:
    """The derivative of the sum of the weighted results along one direction, with an error bound."""

    direction: Tensor
    value: float
    error: float


@dataclass(frozen=True)
class NumericalGradient:
    """The gradient of one argument from differences, in torch's convention for complex numbers.

    Tensors have the argument's shape. For a complex argument, all except `values` have a last dimension of 2
    for real and imaginary parts.

    Args:
        values: The gradient, in float64 or complex128; nan where it was not estimated.
        errors: Distance from `values` within which the right gradient lies; infinite where it is unknown.
        rounding: Rounding error that a right gradient may have.
        estimated: Coordinates that were moved one at a time.
        left: At a kink, the derivative from below; else nan. If only one side has a derivative, as at the
            edge of a domain, the other is nan.
        right: The derivative from above, likewise.
        along: Derivatives along random directions, if not every element was moved.
        slopes: The first estimates, by coordinate.
        second: Makes a second estimate of a coordinate at which a gradient differs.
        wider: Rounding error added to each bound.
    """

    values: Tensor
    errors: Tensor
    rounding: Tensor
    estimated: Tensor
    left: Tensor
    right: Tensor
    along: tuple[DirectionalDerivative, ...]
    slopes: Mapping[int, Slope]
    second: SecondEstimate
    wider: float = 0.0

    @property
    def is_known(self) -> Tensor:
        """Mask of the coordinates whose derivative is known."""
        return self.estimated & self.errors.isfinite()

    @property
    def has_estimate(self) -> bool:
        """True if any element or direction is known, so that a gradient can be judged."""
        return bool(self.along) or bool(self._settled.any())

    @property
    def known(self) -> Tensor:
        """The gradient, with nan where it is unknown; at a kink, the middle of both sides."""
        return self.values.masked_fill(_of_elements(~self._settled, self.values), torch.nan)

    @property
    def kinks(self) -> Tensor:
        """Mask of the elements at which both one-sided derivatives exist, and differ."""
        return _of_elements(self._kinked, self.values)

    @property
    def _kinked(self) -> Tensor:
        return ~(self.left.isnan() | self.right.isnan())

    @property
    def _settled(self) -> Tensor:
        """Mask of the coordinates at which a gradient is judged."""
        return self.is_known | self._kinked

    def widened(self, rounding: float) -> NumericalGradient:
        """The same gradient, with a rounding error of each coordinate added to its bound."""
        return replace(self, wider=rounding)

    def wrong(self, got: Tensor | None) -> Tensor:
        """Mark the elements at which a gradient is certainly wrong; None counts as zeros.

        At a kink it is wrong if it is outside of the interval between both one-sided derivatives. Elements
        without a derivative, or whose derivative is hidden by noise, are not marked.
        """
        return _of_elements(self._units(_coordinates(self._given(got))) > 1, self.values)

    def judge(self, got: Tensor | None) -> Difference | None:
        """Find the element of a gradient furthest outside of its bounds; None if no element is wrong."""
        given = self._given(got)
        numbers = _coordinates(given)
        units = self._units(numbers)
        if (units > 1).any():
            return self._worst(given, units.amax(-1) if given.is_complex() else units)
        for each in self.along:
            value = float(numbers.reshape(-1) @ each.direction)
            error = each.error + self.wider * float(each.direction.norm())
            natural = math.isnan(value) and self.second.line.has_nan
            if not (natural or abs(value - each.value) <= error or self._excuses_along(each, value)):
                off = abs(value - each.value) / error
                return Difference((), value, each.value, 1, 1, off, 1.0, f"{_UNIT} along a random direction")
        return None

    def _units(self, numbers: Tensor) -> Tensor:
        """Compute the distance of each coordinate in error bounds; 0 where it is unknown or excused.

        Second estimates stop once they confirm that some elements are wrong.
        """
        rounding, kinked = self.rounding + self.wider, self._kinked
        low, high = torch.minimum(self.left, self.right), torch.maximum(self.left, self.right)
        outside = torch.maximum(low - numbers, numbers - high)
        off = torch.where(kinked, outside, (numbers - _coordinates(self.values)).abs())
        bounds = torch.where(kinked, KINK * (high - low), self.errors) + rounding
        natural = numbers.isfinite() | (numbers.isnan() & self.second.line.has_nan)
        units = torch.where(natural, off / bounds, torch.inf).nan_to_num(0.0, torch.inf)
        units = torch.where(self._settled & bounds.isfinite(), units, 0.0)
        found = units.view(-1)
        beyond = (found > 1).nonzero().view(-1)
        suspects = beyond[found[beyond].argsort(descending=True)].tolist()
        for start in range(0, len(suspects), SUSPECTS):
            some = suspects[start : start + SUSPECTS]
            excused = [at for at in some if self._excuses(at, float(numbers.reshape(-1)[at]))]
            found[excused] = 0.0
            if len(excused) < len(some):
                break
        return units

    def _excuses(self, at: int, got: float) -> bool:
        """True if a second estimate shows that a coordinate of a gradient may be right."""
        bound = float((self.errors + self.rounding).view(-1)[at])
        return math.isfinite(got) and self.second.excuses(at, got, self.slopes[at], bound)

    def _excuses_along(self, found: DirectionalDerivative, got: float) -> bool:
        """True if differences over finer steps, whose larger errors are independent, allow a value."""
        for finer in (8, 64):
            noise = replace(self.second.noise, step=self.second.noise.step / finer)
            again = derivative_along(self.second.line, noise, found.direction)
            if again is not None and abs(got - again.value) <= again.error:
                return True
        return False

    def _worst(self, given: Tensor, units: Tensor) -> Difference:
        index = unravel(int(units.argmax()), units.shape)
        wrong, total = int((units > 1).sum()), int(_of_elements(self.estimated, self.values).sum())
        got, right = given[index].item(), self.values[index].item()
        return Difference(index, got, right, wrong, total, float(units[index]), 1.0, _UNIT)

    def _given(self, got: Tensor | None) -> Tensor:
        zeros = torch.zeros_like(self.values)
        return zeros if got is None else got.detach().to(zeros.device, zeros.dtype)

    def describe_unknown(self, label: str) -> str | None:
        """Describe the number of unknown elements of a gradient, named by a label; None if all are known."""
        unknown = self.estimated & ~self._settled
        if not bool(unknown.any()):
            return None
        return (
            f"finite differences cannot determine {int(unknown.sum())} of "
            f"{int(self.estimated.sum())} elements of the gradient of `{label}`: the function has a "
            "jump or an edge there, or noise that is larger than the derivative"
        )


SUSPECTS = 16
"""Number of elements for which second estimates are made at a time; the worst come first."""

_UNIT = "error bounds of finite differences"

KINK = 0.02
"""Allowed distance outside of both one-sided derivatives, relative to their difference, since these are
differences of a lower order."""


def numerical_gradient(
    function: Results,
    flat: Sequence[Any],
    argnum: int,
    grads: Sequence[Tensor | None],
    *,
    generator: torch.Generator,
    elements: int = 2048,
    directions: int = 8,
    only: Sequence[int] | None = None,
) -> NumericalGradient:
    """Compute the gradient with respect to one argument from differences, with an error for each element.

    It first measures the precision in which the function computes. Steps and errors follow from the
    precision, and are larger for a function that computes in float32. The argument is copied before it is
    moved.

    Args:
        function: Function of flat arguments.
        flat: Arguments; floating arguments are in float64, unless the function needs a different dtype.
        argnum: Position of the argument to differentiate with respect to.
        grads: grad_output of each result, or None; random, so that errors do not cancel.
        generator: Source of the directions, and of the elements to move.
        elements: Maximum number of elements to move one at a time. Of more elements, random elements and
            random directions are used.
        directions: Number of directions.
        only: Coordinates to move, if not all; no directions are used for the other coordinates.

    Example:
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> cube = lambda flat: [flat[0] ** 3]
        >>> found = numerical_gradient(cube, [x], 0, [torch.ones(2)], generator=torch.Generator())
        >>> found.judge(3 * x**2), str(found.judge(2 * x**2))
        (None, 'at [1] it is 8 where 12 is right; 2 of 2 elements are wrong')
    """
    line = DirectionalFunction(function, flat, argnum, grads)
    noise = noise_of(line, generator)
    argument, total = flat[argnum], line.coordinates.numel()
    chosen, along = range(total) if only is None else only, []
    if only is None and total > elements:
        chosen = torch.randperm(total, generator=generator)[:elements].tolist()
    shape = torch.view_as_real(argument).shape if argument.is_complex() else argument.shape
    table = torch.full((5, total), torch.nan, dtype=torch.float64)
    table[1], table[2] = torch.inf, 0.0
    slopes: dict[int, Slope] = {}
    for at in chosen:
        slopes[at], lost = _element(line, noise, at)
        value, error = slopes[at].value, max(slopes[at].error, GOAL * abs(slopes[at].value))
        row = [value, error, lost, slopes[at].left, slopes[at].right]
        table[:, at] = torch.tensor(row, dtype=torch.float64)
    if only is None and total > elements:
        along = [derivative_along(line, noise, line.direction(generator)) for _ in range(directions)]
    estimated = torch.zeros(total, dtype=torch.bool)
    estimated[list(chosen)] = True
    # Rounding of the judged gradient itself, in units of the measured precision.
    table[2] += LIBRARY * noise.precision * largest_magnitude(table[0, table[1].isfinite()])
    values, errors, rounding, left, right = (row.view(shape) for row in table)
    return NumericalGradient(
        torch.view_as_complex(values) if argument.is_complex() else values,
        errors,
        rounding,
        estimated.view(shape),
        left,
        right,
        tuple(each for each in along if each is not None),
        slopes,
        SecondEstimate(line, noise, generator),
    )


def _element(line: DirectionalFunction, noise: Noise, coordinate: int) -> tuple[Slope, float]:
    """Estimate the derivative by one coordinate, and the rounding error that a right gradient may have."""
    own = float(line.sizes[coordinate])
    steps = [*_steps(own, line.usual, noise.step)]
    reached = _reached(line, coordinate, own)
    count = int(reached.sum())
    noise_level, weight, moves, expected = (
        float(each[reached].norm()) for each in (noise.levels, line.weighed, noise.slopes, noise.expected)
    )
    scale = max(own, line.usual)
    moves = max(moves / max(count, 1) ** 0.5, noise.usual)
    size = max(moves, SMALL * weight, NOISY * expected / noise.step) / scale
    goal = min(max(GOAL, 64 * noise.step**4), 0.1)

    def moved(step: float) -> tuple[float, float]:
        distance, moves = line.at(coordinate, step)
        return distance, float(moves.sum())

    found = slope(moved, steps, noise_level, size, goal)
    lost = allowed_roundings(count) * (noise.precision * abs(found.value) + noise_level / scale)
    return found, lost


def _reached(line: DirectionalFunction, coordinate: int, own: float) -> Tensor:
    """Mark the results that depend on a coordinate, since a small step may not change a saturated result.

    The coordinate moves to minus half of itself, at which odd and even functions both change.
    """
    _, moves = line.at(coordinate, -1.5 * float(line.coordinates[coordinate]) if own else line.usual)
    reached = moves != 0
    return reached if reached.any() else torch.ones_like(reached)


SMALL = 1e-4
NOISY = 600
"""Ratios of a derivative to the function's size, and to its noise, below which it is small, so that `slope`
needs to know it only to a fraction of these."""


def _steps(own: float, usual: float, step: float) -> Iterator[float]:
    """Yield steps for an element: of its own size, or the usual size if it is much smaller; then finer."""
    if own >= usual / 64:
        yield step * own
        if own < usual / 4:
            yield step * usual
    else:
        yield step * usual
        if own > 0:
            yield step * own
    smallest = min(own, usual) if own > 0 else usual
    for exponent in range(1, FINER + 1):
        yield step * smallest / 8**exponent


def derivative_along(
    line: DirectionalFunction, noise: Noise, direction: Tensor
) -> DirectionalDerivative | None:
    """Estimate the derivative of the sum of weighted results along a direction; None if unknown.

    Args:
        line: The function of one argument.
        noise: Its noise.
        direction: Move of every coordinate, by about its own size.
    """

    def moved(step: float) -> tuple[float, float]:
        return step, float(line.along(direction, step).sum())

    # Rounding of the moved argument: the slope along the measured direction may be small by chance.
    rounded = line.unit * abs(moved(noise.step)[1]) / noise.step
    noise_level = max(float(noise.levels.norm()), rounded if math.isfinite(rounded) else 0.0)
    size = max(float(noise.slopes.norm()), SMALL * float(line.weighed.norm()))
    size = max(size, NOISY * float(noise.expected.norm()) / noise.step)
    steps = [noise.step / 8**exponent for exponent in range(FINER + 1)]
    found = slope(moved, steps, noise_level, size, GOAL)
    if not found.is_known:
        return None
    count = line.weighed.numel() + direction.numel()
    lost = allowed_roundings(count) * (noise.precision * abs(found.value) + noise_level)
    error = max(found.error + lost, torch.finfo(torch.float64).tiny)  # 0 for a constant function
    return DirectionalDerivative(direction, found.value, error)


def _of_elements(coordinates: Tensor, like: Tensor) -> Tensor:
    return coordinates.any(-1) if like.is_complex() else coordinates


def _coordinates(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


DIRECTIONS = 2
"""Number of random directions along which derivatives are compared."""

STEP = 2.0**-10
"""Relative step along them: both its fourth power and rounding divided by it are far below `SHARE`."""

SHARE = 1e-10
"""Maximum difference of the derivative, relative to its terms. A function that computes in a lower precision
than float64 does not agree so well."""

BEND = 1e-6
"""Maximum kink, relative to the terms. Second differences shrink with the square of the step if a function is
smooth, but with the step itself at a kink."""


def agrees_along(
    function: Results,
    flat: Sequence[Any],
    argnum: int,
    grads: Sequence[Tensor | None],
    got: Tensor,
    *,
    generator: torch.Generator,
) -> bool:
    """True if a gradient agrees with differences along random directions, and the point has no kink.

    Every element moves by a random part of its own size, so that errors do not cancel. False proves nothing:
    `numerical_gradient` must measure noise, kinks and each element.

    Args:
        function: Function of flat arguments.
        flat: Arguments; floating arguments are in float64.
        argnum: Position of the argument.
        grads: grad_output of each result, None where there is none.
        got: The gradient, of the argument's shape.
        generator: Source of the directions.

    Example:
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> cube = lambda flat: [flat[0] ** 3]
        >>> known = cube, [x], 0, [torch.ones(2)]
        >>> [agrees_along(*known, got, generator=torch.Generator()) for got in (3 * x**2, 3 * x)]
        [True, False]
    """
    line = DirectionalFunction(function, flat, argnum, grads)
    given = coordinates(got).double()
    if given.shape != line.coordinates.shape or not given.numel():
        return False
    for _ in range(min(DIRECTIONS, given.numel())):
        parts = 0.5 + torch.rand(given.shape, generator=generator, dtype=torch.float64)
        direction = line.direction(generator) * parts
        terms = given * direction
        size = float(terms.abs().sum())
        (coarse, bend), (fine, finer_bend) = (_central(line, direction, step) for step in (STEP, STEP / 2))
        off, kink = abs(float(terms.sum()) - (4 * fine - coarse) / 3), abs(4 * finer_bend - bend)
        if not (off <= SHARE * size and kink <= BEND * STEP * size):
            return False
    return True


def _central(line: DirectionalFunction, direction: Tensor, step: float) -> tuple[float, float]:
    """Compute the central difference quotient, and the second difference."""
    above, below = (float(line.along(direction, each).sum()) for each in (step, -step))
    return (above - below) / (2 * step), above + below


ALONG = 3
"""Number of random directions for the elements that are not moved one at a time."""


@dataclass(frozen=True)
class Claim:
    """Derivatives of a function by several arguments together, to be compared with its differences.

    Args:
        function: The function of all arguments.
        packed: Its arguments; the arguments to differentiate by are packed in a row.
        grads: grad_output of each result; None for a result without one.
        got: The derivative by each argument of the row; None if autograd returns none.
        elements: Maximum number of elements that may be moved one at a time.
        generator: Function that makes the source of directions.
    """

    function: Results
    packed: PackedTensors
    grads: Sequence[Tensor | None]
    got: Mapping[int, Tensor | None]
    elements: int
    generator: Callable[[], torch.Generator]

    def by(self, argnum: int) -> Claim:
        """The part of the claim that concerns one argument."""
        return replace(self, packed=PackedTensors(self.packed.values, (argnum,)))

    @property
    def row(self) -> Tensor:
        """The derivatives in a row."""
        pieces = [
            torch.zeros(size, dtype=torch.float64) if piece is None else coordinates(piece).cpu().double()
            for piece, size in zip(map(self.got.get, self.packed.argnums), self.packed.sizes, strict=True)
        ]
        return torch.cat(pieces)

    def _of_row(self, flat: Sequence[Any]) -> Sequence[Tensor]:
        return self.function(self.packed.unpacked(flat[0]))

    def is_settled(self) -> bool:
        """True if differences along random directions prove that it is right."""
        flat, generator = [self.packed.row], self.generator()
        return agrees_along(self._of_row, flat, 0, self.grads, self.row, generator=generator)

    @cached_property
    def numbers(self) -> NumericalGradient:
        """The derivatives from differences, in a row."""
        return numerical_gradient(
            self._of_row,
            [self.packed.row],
            0,
            self.grads,
            elements=self.elements,
            directions=min(ALONG, self.row.numel()),
            generator=self.generator(),
        )

    @property
    def holds(self) -> bool:
        """True if the differences are known and confirm the derivatives."""
        return self.numbers.has_estimate and self.worst() is None

    def worst(self, rounding: float = 0.0) -> tuple[int, Difference] | None:
        """The argument by which the derivatives differ most, and the difference; None if all agree.

        Args:
            rounding: Additional rounding error of each derivative.
        """
        difference = self.numbers.widened(rounding).judge(self.row)
        if difference is None or not difference.index:
            return None if difference is None else (self.packed.argnums[0], difference)
        argnum, position = self.packed.locate(difference.index[0])
        value = self.packed.values[argnum]
        at = position // 2 if value.is_complex() else position
        return argnum, replace(difference, index=unravel(at, value.shape))

    def kinked(self) -> list[int]:
        """The arguments in which the function has a kink."""
        pieces = self.numbers.kinks.split(self.packed.sizes)
        return [argnum for argnum, piece in zip(self.packed.argnums, pieces, strict=True) if piece.any()]
