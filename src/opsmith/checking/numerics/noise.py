"""How much a function's values jitter, whatever it computes in: measured, and not read off a dtype.

A function that computes in float32, or in half, although float64 comes in, has values on a staircase: over a
step below the width of a stair it does not move at all, or by a whole stair. So the precision of an operator
shows when its difference quotients over steps from 1/4 of its arguments down to their last bits are laid side
by side: they agree best at some step, and over finer ones they leave that value by the noise over the step
(after J. J. Moré and S. M. Wild, "Estimating computational noise", SIAM J. Sci. Comput., 2011).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from opsmith.checking.numerics.directional import Line
from opsmith.checking.numerics.slope import NOISES, Slope

STEPS = tuple(2.0**-exponent for exponent in (1, 2, 3, *range(5, 47, 3)))
"""Relative to each element: close together where half precision shows, and 8 times finer each further on."""

AGREE = 0.12
"""Quotients over two neighbouring steps that differ by more than this fraction do not agree."""

COARSE = 0.06
FLAT = 1.5
DROP = 2.0**20
"""Stairs: quotients over many of them agree to `COARSE`; over fewer, what they disagree by, times the step,
falls more slowly than the step to the power of `FLAT`, where a smooth function's falls with its cube; and on
a single tread it drops by `DROP` within two steps."""

COARSEST = 2.0**-6
"""Above half of the eps of bfloat16, 2**-9: what jitters by more than this jumps, and does not round."""

TYPICAL = 0.25
"""The part of the results that stands for the precision of all: others lie at jumps, or cancel."""


@dataclass(frozen=True)
class Noise:
    """How far rounding moves the weighed results.

    Args:
        levels: For each of them, how far.
        expected: The same, if all were as exact as most are: at a jump `levels` are larger.
        slopes: For each of them, how far it moves per unit of relative change of the argument.
        usual: The quadratic mean of the slopes.
        precision: The precision that it computes in, as half of its eps: noise beside values or slopes.
        step: The relative step at which differences are most exact.
    """

    levels: Tensor
    expected: Tensor
    slopes: Tensor
    usual: float
    precision: float
    step: float


def noise_of(line: Line, generator: torch.Generator) -> Noise:
    """Measure it, along one random direction in which every element moves by its own size.

    Args:
        line: The function, as it moves with one argument.
        generator: Source of the direction.
    """
    direction = line.direction(generator)
    rows = torch.stack([_quotient(line, direction, step) for step in STEPS])
    steps = torch.tensor(STEPS, dtype=torch.float64).unsqueeze(1)
    size = line.weighed.abs()
    apart = (rows[:-1] - rows[1:]).abs()
    larger = torch.maximum(rows[:-1].abs(), rows[1:].abs())
    least_apart = torch.maximum(apart, line.rounding * size / steps[1:])  # nearer than rounding is chance
    ratio = (least_apart / larger).nan_to_num(
        torch.inf, torch.inf, torch.inf
    )  # what stays agrees with nothing
    least, best = _plateau(ratio, (steps[:-1] * apart).nan_to_num(0.0, 0.0, 0.0), line.rounding * size)
    plateau = rows.gather(0, best.unsqueeze(0)).squeeze(0)
    jitter = (steps[1:] * apart).nan_to_num(0.0, 0.0, 0.0)
    finer = torch.arange(len(apart)).unsqueeze(1) >= best.unsqueeze(0)
    settled = torch.where(finer, jitter, 0.0).amax(0)
    # Where no two steps agree, it jumps here and there (noise of the same size at every step), or but once.
    unsettled = jitter.median(0).values
    agrees = least <= AGREE
    measured = torch.where(agrees, settled, unsettled)
    slopes = torch.where(agrees, plateau.nan_to_num(0.0, 0.0, 0.0), 0.0)
    beside = measured / torch.maximum(size, slopes.abs())
    precision = _typical(beside[agrees & beside.isfinite()])
    precision = precision if precision <= COARSEST else 0.0
    expected = torch.maximum(precision * torch.maximum(size, slopes.abs()), line.rounding * size)
    levels = torch.maximum(measured, expected)
    rounding = float(line.rounding.max()) if line.rounding.numel() else 0.0
    usual = float(slopes.norm()) / max(slopes.numel(), 1) ** 0.5
    finest = _typical(steps.squeeze(1)[best[agrees]])
    return Noise(levels, expected, slopes, usual, max(precision, rounding), _step(expected, slopes, finest))


def _step(expected: Tensor, slopes: Tensor, plateau: float) -> float:
    """The relative step for Richardson's extrapolation, from noise and from the best step without it.

    Without extrapolation the error is `(h / L)**2 + noise / h` for a function that bends over a length `L`,
    least at `h = L noise**(1/3)`; with it `(h / L)**4 + noise / h`, least at `h = L noise**(1/5)`.
    """
    moves = float(slopes.norm())
    if not moves or not math.isfinite(moves) or not plateau:
        return 2.0**-10
    noise = min(max(float(expected.norm()) / moves, 2.0**-54), 1.0)
    return min(max(math.pow(noise, 1 / 5), 2.0**-11), 8 * plateau * math.pow(noise, -2 / 15), 2.0**-2)


def _typical(values: Tensor) -> float:
    return float(values.quantile(TYPICAL)) if values.numel() else 0.0


def _plateau(ratio: Tensor, apart: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """For each result how well quotients over neighbouring steps agree where they do best, and where that is.

    On a stair whose tread is no level one, as of `x * x.float().exp()`, they agree best of all, and on
    another value than over many stairs, which is the one that is wanted.

    Args:
        ratio: By what fraction the quotients of each step differ from the next one's.
        apart: The same in the function's own values.
        rounding: What rounding a result does.
    """
    least, best = ratio.amin(0), ratio.argmin(0)  # `min(0)` wakes all threads, however small the tensor
    rows = torch.arange(len(ratio)).unsqueeze(1)
    after = torch.maximum(torch.cat([apart[2:], apart[-1:], apart[-1:]]), rounding)
    previous = torch.cat([torch.full_like(apart[:1], torch.inf), apart[:-1]])
    finer = torch.tensor([1.0, *(b / a for a, b in pairwise(STEPS[:-1]))], dtype=torch.float64).unsqueeze(1)
    edge = (apart >= previous * finer**FLAT) & (apart >= DROP * after) & (rows < best)
    last = torch.where(edge, rows, -1).amax(0)
    before = torch.where(rows < last, ratio, torch.inf)
    coarse, place = before.amin(0), before.argmin(0)
    stairs = coarse <= COARSE
    return torch.where(stairs, coarse, least), torch.where(stairs, place, best)


def _quotient(line: Line, direction: Tensor, step: float) -> Tensor:
    above, below = line.along(direction, step), line.along(direction, -step)
    return (above - below) / (2 * step)


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
