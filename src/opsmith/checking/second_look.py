"""A second, dearer look at an element of a gradient that differs from what differences say.

What differences say of one element is not the whole truth where a function bends sharply nearby, in other
elements too, or computes in steps. So before an element is called wrong, each of these is tried:

- its noise, measured again, and over every result that it can reach at all, far away as well;
- the derivative at points beside this one, in random directions: where equal elements meet, as in a sort or a
  median, an answer is as good as any of these;
- the derivative on the tread of a stair: of a function that is a staircase (`floor`), differences over many
  stairs give the slope of the whole, and autograd that of a tread. A function that computes in half precision
  looks the same, but its stairs grow with its argument.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from opsmith.checking.line import Line
from opsmith.checking.noise import Noise, noise_of
from opsmith.checking.slope import NOISES, Slope

BESIDE = 2.0**-20
POINTS = 8
TREADS = (2.0**-26, 2.0**-32)
WIDE = 2.0**-14
"""A precision coarser than this may be that of a staircase; nobody rounds to more digits on purpose."""

SPREAD = 1e-4
"""Derivatives at points beside each other that differ by more than this fraction may lie across a kink."""

EXACT = 1e-6
"""Relative error of the slope of a tread."""


class SecondLook:
    """What is found out about one argument's gradient when it is asked for.

    Args:
        line: The function.
        noise: Its noise, as measured before.
        generator: Source of directions.
    """

    def __init__(self, line: Line, noise: Noise, generator: torch.Generator) -> None:
        self._line, self._noise, self._generator = line, noise, generator

    def excuses(self, coordinate: int, got: float, found: Slope, bound: float) -> bool:
        """Whether an answer that differs may be right for all that.

        Args:
            coordinate: Which coordinate of the argument.
            got: The answer.
            found: What differences said.
            bound: How far from that it may be.
        """
        return (
            self._blurred(coordinate, got, found, bound)
            or self._beside(coordinate, got, found)
            or self._on_a_tread(coordinate, got, found, bound)
        )

    @cached_property
    def _levels(self) -> Tensor:
        more = [noise_of(self._line, self._generator).levels for _ in range(2)]
        return torch.stack([self._noise.levels, *more]).amax(0)

    def _blurred(self, coordinate: int, got: float, found: Slope, bound: float) -> bool:
        if not found.told:
            return False
        line, own = self._line, self._size(coordinate)
        far = 64 * max(own, line.usual)
        reached = torch.stack([line.at(coordinate, step)[1] != 0 for step in (-1.5 * own, far, -far)]).any(0)
        levels = self._levels[reached] if reached.any() else self._levels
        return abs(got - found.value) <= bound + 2 * NOISES * float(levels.norm()) / found.step

    def _beside(self, coordinate: int, got: float, found: Slope) -> bool:
        # Points within the step that told the derivative: what it did not see, such as a pole, is no kink.
        reach = min(BESIDE, found.step / self._size(coordinate) / 64) if found.told else BESIDE
        parts = torch.rand(POINTS, self._line.coordinates.numel(), generator=self._generator).double()
        directions = [part * self._line.direction(self._generator) for part in parts]
        near, blur = self._hull(coordinate, directions, reach / 8)
        far, _ = self._hull(coordinate, directions, reach)
        if near is None or far is None:
            return False
        (low, high), room = near, SPREAD * max(map(abs, near)) + blur
        # Of a smooth function, however steep, derivatives draw together with the points; not across a kink.
        kinked = high - low > max(room + 3 * blur, (far[1] - far[0]) / 3)
        return kinked and low - room <= got <= high + room

    def _hull(
        self, coordinate: int, directions: list[Tensor], reach: float
    ) -> tuple[tuple[float, float] | None, float]:
        """The least and the largest derivative at points beside, and how far noise may move either."""
        step = reach / 64 * self._size(coordinate)
        slopes: list[float] = []
        for direction in directions:
            near = self._line.shifted(reach * direction)
            (rise, above), (fall, below) = (near.at(coordinate, side * step) for side in (1, -1))
            slopes.append(float((above - below).sum()) / (rise - fall) if rise > fall else math.nan)
        if not all(map(math.isfinite, slopes)):
            return None, 0.0
        return (min(slopes), max(slopes)), NOISES * float(self._noise.levels.norm()) / step

    def _on_a_tread(self, coordinate: int, got: float, found: Slope, bound: float) -> bool:
        own = self._size(coordinate)
        for size in TREADS:
            (rise, above), (fall, below) = (self._line.at(coordinate, side * size * own) for side in (1, -1))
            if rise <= fall:
                return False
            tread = float((above - below).sum()) / (rise - fall)
            if got == tread == 0:
                return self._staircase
            moved = (above != 0) | (below != 0)
            blur = 2 * NOISES * float((self._line.rounding * self._line.weighed)[moved].norm()) / (size * own)
            if not abs(got - tread) <= blur + EXACT * abs(got):
                return False
            if found.told and abs(found.value - tread) <= bound + blur:
                return False
        return True

    @cached_property
    def _staircase(self) -> bool:
        """Whether it is a staircase by itself, whose stairs do not shrink with its argument."""
        if self._noise.precision < WIDE:
            return False
        smaller = noise_of(self._line.shifted(-63 / 64 * self._line.coordinates), self._generator)
        return not self._noise.precision / 8 <= smaller.precision <= self._noise.precision * 8

    def _size(self, coordinate: int) -> float:
        return float(self._line.sizes[coordinate]) or self._line.usual
