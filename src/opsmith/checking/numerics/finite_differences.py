"""The gradient of a function by one of its arguments, from differences alone, each element with its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.autodiff import Results
from opsmith.checking.numerics.compare import Difference
from opsmith.checking.numerics.directional import Line
from opsmith.checking.numerics.noise import Noise, SecondLook, noise_of
from opsmith.checking.numerics.rounding import LIBRARY, SUMMATION
from opsmith.checking.numerics.slope import Slope, slope

GOAL = 1e-6
"""Relative error at which differences are good enough, where the function's noise allows it; less is not
claimed, since functions of libraries, such as `polygamma`, need not be better."""

FINER = 8
"""How often a step is divided by 8 where differences do not settle."""


Doubts = Callable[[int, float], bool]


@dataclass(frozen=True)
class Along:
    """The derivative along one random direction.

    Args:
        direction: How each coordinate moves.
        value: The derivative of the sum of the weighed results.
        error: How far from that the right one may lie.
    """

    direction: Tensor
    value: float
    error: float


@dataclass(frozen=True)
class NumericalGradient:
    """What differences say about the gradient by one argument, in torch's convention for complex ones.

    Args:
        values: The gradient, in float64 or complex128; nan where it was not looked at.
        errors: How far from `values` the right gradient may lie, for each coordinate (of a complex tensor,
            for real and imaginary parts, in a last dimension of 2); infinite where it cannot be told.
        rounding: How far a right gradient may be off by its own rounding, for each coordinate.
        looked: Coordinates that were moved one at a time.
        left: At a kink, the derivative from below, for each coordinate; else nan. Where only one side has a
            derivative, as at the edge of a domain, the other is nan.
        right: The derivative from above, likewise.
        along: Derivatives along random directions, where not every element was moved.
        doubts: Takes a second look at a coordinate whose answer differs: whether it may be right after all.
        beside_nan: Whether a result is nan, so that a gradient may be, too.
        precision: The precision that the function was seen to compute in: half of its eps.
    """

    values: Tensor
    errors: Tensor
    rounding: Tensor
    looked: Tensor
    left: Tensor
    right: Tensor
    along: tuple[Along, ...]
    precision: float
    doubts: Doubts
    beside_nan: bool = False

    @property
    def told(self) -> Tensor:
        """Coordinates whose derivative is known."""
        return self.looked & self.errors.isfinite()

    @property
    def tells(self) -> bool:
        """Whether differences say anything, so that a gradient can be wrong."""
        return bool(self.along) or bool((self.told | self._kinked).any())

    @property
    def known(self) -> Tensor:
        """The gradient, with nan wherever differences do not tell it; at a kink, what lies in its middle."""
        untold = _of_elements(~(self.told | self._kinked), self.values)
        return self.values.masked_fill(untold, torch.nan)

    @property
    def kinks(self) -> Tensor:
        """Elements at which both one-sided derivatives exist, and differ."""
        return _of_elements(self._kinked, self.values)

    @property
    def _kinked(self) -> Tensor:
        return ~(self.left.isnan() | self.right.isnan())

    def wrong(self, got: Tensor | None) -> Tensor:
        """Elements at which a gradient is wrong beyond doubt.

        At a kink it is wrong if it lies outside of what is between both one-sided derivatives. Where there is
        no derivative, or noise hides it, nothing is wrong.

        Args:
            got: The gradient, of the argument's shape; None stands for zeros.
        """
        mine = _coordinates(self._given(got))
        return _of_elements(self._confirmed(mine, self._units(mine)) > 1, self.values)

    def _units(self, mine: Tensor) -> Tensor:
        """How far each coordinate of a gradient is off, in error bounds; 0 where nothing can be said."""
        bounds = self.errors + self.rounding
        off = (mine - _coordinates(self.values)).abs()
        low, high = torch.minimum(self.left, self.right), torch.maximum(self.left, self.right)
        outside = torch.maximum(low - mine, mine - high)
        kinked = self._kinked
        off = torch.where(kinked, outside, off)
        bounds = torch.where(kinked, KINK * (high - low) + self.rounding, bounds)
        natural = mine.isfinite() | (mine.isnan() & self.beside_nan)
        units = torch.where(natural, off / bounds, torch.inf)
        return torch.where((self.told | kinked) & bounds.isfinite(), units.nan_to_num(0.0, torch.inf), 0.0)

    def judge(self, got: Tensor | None) -> Difference | None:
        """The element of a gradient that is furthest outside its bounds; None where none is wrong.

        Args:
            got: The gradient, of the argument's shape; None stands for zeros.
        """
        given = self._given(got)
        mine = _coordinates(given)
        units = self._confirmed(mine, self._units(mine))
        if (units > 1).any():
            return self._worst(given, units)
        for each in self.along:
            value = float(mine.reshape(-1) @ each.direction)
            if not abs(value - each.value) <= each.error:
                off = abs(value - each.value) / each.error
                return Difference((), value, each.value, 1, 1, off, 1.0, f"{_UNIT} along a random direction")
        return None

    def _confirmed(self, mine: Tensor, units: Tensor) -> Tensor:
        """The same, without what a second look excuses; it ends where it confirms that some are wrong."""
        units, numbers = units.clone(), mine.reshape(-1)
        found = units.view(-1)
        beyond = (found > 1).nonzero().view(-1)
        suspects = beyond[found[beyond].argsort(descending=True)].tolist()
        for start in range(0, len(suspects), SUSPECTS):
            some = suspects[start : start + SUSPECTS]
            excused = [at for at in some if self.doubts(at, float(numbers[at]))]
            found[excused] = 0.0
            if len(excused) < len(some):
                break
        return units

    def _worst(self, given: Tensor, units: Tensor) -> Difference:
        whole = units.amax(-1) if given.is_complex() else units
        index = tuple(int(i) for i in torch.unravel_index(whole.argmax(), whole.shape)) if whole.dim() else ()
        return Difference(
            index,
            given[index].item(),
            self.values[index].item(),
            int((whole > 1).sum()),
            int(_of_elements(self.looked, self.values).sum()),
            float(whole[index]),
            1.0,
            _UNIT,
        )

    def _given(self, got: Tensor | None) -> Tensor:
        zeros = torch.zeros_like(self.values)
        return zeros if got is None else got.detach().to(zeros.device, zeros.dtype)

    def untold(self, label: str) -> str | None:
        """How many elements could not be told, in words; None where all that were moved could be.

        Args:
            label: How messages call the argument.
        """
        untold = self.looked & ~(self.told | self._kinked)
        if not bool(untold.any()):
            return None
        return (
            f"finite differences cannot tell {int(untold.sum())} of {int(self.looked.sum())} elements of "
            f"the gradient by `{label}`: there is a jump, an edge, or noise larger than the derivative"
        )


SUSPECTS = 16
"""How many elements a second look takes at a time, the worst first."""

_UNIT = "error bounds of finite differences"

KINK = 0.02
"""How far outside of both one-sided derivatives an answer may lie, as a part of what they differ by: they are
differences of a lower order."""


def numerical_gradient(
    function: Results,
    flat: Sequence[Any],
    place: int,
    grads: Sequence[Tensor | None],
    *,
    generator: torch.Generator,
    elements: int = 2048,
    directions: int = 8,
    only: Sequence[int] | None = None,
) -> NumericalGradient:
    """The gradient of a function by one of its arguments, from differences, with the error of each element.

    It first measures the precision that the function computes in, from which steps and errors follow; so a
    function that computes in float32 is not blamed for it, and the gradient of one that does not is held to
    more digits. What is moved is a contiguous copy; nothing that is given is written to.

    Args:
        function: Takes flat arguments, returns results.
        flat: Arguments; floating ones in float64, unless the function needs another dtype.
        place: Which of them to differentiate by.
        grads: Gradient of each result, None where there is none; random ones, so that errors do not cancel.
        generator: Source of the directions, and of which elements to move.
        elements: How many elements to move one at a time; beyond, random ones, and random directions.
        directions: How many directions.
        only: Which coordinates to move, if not all; then nothing stands for the others.

    Example:
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> cube = lambda flat: [flat[0] ** 3]
        >>> found = numerical_gradient(cube, [x], 0, [torch.ones(2)], generator=torch.Generator())
        >>> found.judge(3 * x**2), str(found.judge(2 * x**2))
        (None, 'at [1] it is 8 where 12 is right; 2 of 2 elements are wrong')
    """
    line = Line(function, flat, place, grads)
    noise = noise_of(line, generator)
    total = line.coordinates.numel()
    values = torch.full((total,), torch.nan, dtype=torch.float64)
    errors = torch.full((total,), torch.inf, dtype=torch.float64)
    rounding = torch.zeros(total, dtype=torch.float64)
    left, right = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
    all_of_them = only is not None or total <= elements
    if only is not None:
        chosen: Sequence[int] = list(only)
    else:
        chosen = range(total) if all_of_them else _some(total, elements, generator)
    slopes: dict[int, Slope] = {}
    for coordinate in chosen:
        found, rounding[coordinate] = _element(line, noise, coordinate)
        slopes[coordinate] = found
        values[coordinate], errors[coordinate] = found.value, max(found.error, GOAL * abs(found.value))
        left[coordinate], right[coordinate] = found.left, found.right
    along = (
        []
        if all_of_them
        else [derivative_along(line, noise, line.direction(generator)) for _ in range(directions)]
    )
    looked = torch.zeros(total, dtype=torch.bool)
    looked[list(chosen)] = True
    known = values[errors.isfinite()].abs()
    largest = float(known.max()) if known.numel() else 0.0
    # What the judged gradient itself may lose, as of `rounding`, in units of the precision that was measured.
    rounding += LIBRARY * noise.precision * largest
    second = SecondLook(line, noise, generator)

    def doubts(coordinate: int, got: float) -> bool:
        bound = float(errors[coordinate] + rounding[coordinate])
        return math.isfinite(got) and second.excuses(coordinate, got, slopes[coordinate], bound)

    argument = flat[place]
    shape = torch.view_as_real(argument).shape if argument.is_complex() else argument.shape
    shaped = values.view(shape)
    return NumericalGradient(
        torch.view_as_complex(shaped) if argument.is_complex() else shaped,
        errors.view(shape),
        rounding.view(shape),
        looked.view(shape),
        left.view(shape),
        right.view(shape),
        tuple(each for each in along if each is not None),
        noise.precision,
        doubts,
        line.has_nan,
    )


def _some(total: int, count: int, generator: torch.Generator) -> list[int]:
    found: list[int] = torch.randperm(total, generator=generator)[:count].tolist()
    return found


def _element(line: Line, noise: Noise, coordinate: int) -> tuple[Slope, float]:
    """The derivative by one coordinate, and how far a right gradient may be off there by its own rounding."""
    own = float(line.sizes[coordinate])
    steps = [*_steps(own, line.usual, noise.step)]
    reached = _reached(line, coordinate, own)
    count = int(reached.sum())
    jitter = float(noise.levels[reached].norm())
    scale = max(own, line.usual)
    weight = float(line.weighed[reached].norm())
    moves = max(float(noise.slopes[reached].norm()) / max(count, 1) ** 0.5, noise.usual) / scale
    size = max(
        moves, SMALL * weight / scale, NOISY * float(noise.expected[reached].norm()) / (noise.step * scale)
    )
    goal = min(max(GOAL, 64 * noise.step**4), 0.1)

    def moved(step: float) -> tuple[float, float]:
        distance, moves = line.at(coordinate, step)
        return distance, float(moves.sum())

    found = slope(moved, steps, jitter, size, goal)
    lost = (LIBRARY + SUMMATION * count**0.5) * (noise.precision * abs(found.value) + jitter / scale)
    return found, lost


def _reached(line: Line, coordinate: int, own: float) -> Tensor:
    """The results that depend on a coordinate: a step may be too small for one that is near saturation.

    It goes to minus half of itself, which is another value of odd functions and of even ones.
    """
    _, moves = line.at(coordinate, -1.5 * float(line.coordinates[coordinate]) if own else line.usual)
    reached = moves != 0
    return reached if reached.any() else torch.ones_like(reached)


SMALL = 1e-4
NOISY = 600
"""How large a derivative is beside a function's size, and beside its noise, that counts as small: `slope`
need not know it better than to a fraction of that."""


def _steps(own: float, usual: float, step: float) -> Iterator[float]:
    """Steps for an element: first of its own size, or the usual one where it is much smaller; then finer."""
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


def derivative_along(line: Line, noise: Noise, direction: Tensor) -> Along | None:
    """The derivative of the sum of weighed results along a direction; None where it cannot be told.

    Args:
        line: The function.
        noise: Its noise.
        direction: A move of every coordinate, by about its own size.
    """
    jitter = float(noise.levels.norm())
    weight = float(line.weighed.norm())

    def moved(step: float) -> tuple[float, float]:
        return step, float(line.along(direction, step).sum())

    size = max(float(noise.slopes.norm()), SMALL * weight, NOISY * float(noise.expected.norm()) / noise.step)
    steps = [noise.step / 8**exponent for exponent in range(FINER + 1)]
    found = slope(moved, steps, jitter, size, GOAL)
    if not found.told:
        return None
    count = line.weighed.numel() + direction.numel()
    lost = (LIBRARY + SUMMATION * count**0.5) * (noise.precision * abs(found.value) + jitter)
    return Along(direction, found.value, found.error + lost)


def _of_elements(coordinates: Tensor, like: Tensor) -> Tensor:
    return coordinates.any(-1) if like.is_complex() else coordinates


def _coordinates(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
