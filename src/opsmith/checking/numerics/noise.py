"""Rounding noise of a function, measured from its values and not assumed from a dtype.

A function that computes in float32, or in half precision, on float64 inputs has values on a staircase: over a
step below the width of a stair it does not move, or moves by a whole stair. Its precision therefore shows in
difference quotients over steps from 1/2 of the arguments down to their last bits: they agree best at some
step, and over finer steps they leave that value by the noise divided by the step (after J. J. Moré and S. M.
Wild, "Estimating computational noise", SIAM J. Sci. Comput., 2011).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from opsmith.checking.numerics.directional import NOISES, DirectionalFunction, Slope
from opsmith.core.cached_property import cached_property

STEPS = tuple(2.0**-exponent for exponent in (1, 2, 3, *range(5, 47, 3)))
"""Relative to each element: close together where half precision shows, then each 8 times finer."""

AGREE = 0.12
"""Largest relative difference of two quotients over neighbouring steps that agree."""

COARSE = 0.06
FLAT = 1.5
DROP = 2.0**20
"""Criteria of a staircase. Quotients over many stairs agree to `COARSE`. Over fewer stairs their difference
times the step falls more slowly than the step to the power of `FLAT`; that of a smooth function falls with
its cube. On a single tread it drops by `DROP` within two steps."""

INSIDE = 3
"""Number of finer steps after the edge of a tread at which a quotient stays on one."""

PLACES = 16
"""Number of places at which slopes are taken, to tell stairs from bends."""

COARSEST = 2.0**-6
"""Above half of the eps of bfloat16, 2**-9: a function with larger noise jumps, and does not round."""

TYPICAL = 0.25
"""Quantile of the results that stands for the precision of all: others lie at jumps, or cancel."""


@dataclass(frozen=True)
class Noise:
    """Effect of rounding on the weighted results.

    Args:
        levels: Noise of each weighted result.
        expected: The same, if every result were as exact as most are; `levels` are larger at a jump.
        slopes: Change of each weighted result per unit of relative change of the argument.
        usual: Quadratic mean of the slopes.
        precision: Precision that the function computes in, as half of its eps: noise relative to values or
            slopes.
        step: Relative step at which differences are most exact.
    """

    levels: Tensor
    expected: Tensor
    slopes: Tensor
    usual: float
    precision: float
    step: float


def noise_of(line: DirectionalFunction, generator: torch.Generator) -> Noise:
    """Measure the noise, along one random direction in which every element moves by its own size."""
    direction = line.direction(generator)
    rows = torch.stack([_quotient(line, direction, step) for step in STEPS])
    steps = torch.tensor(STEPS, dtype=torch.float64).unsqueeze(1)
    size = line.weighed.abs()
    apart = (rows[:-1] - rows[1:]).abs()
    larger = torch.maximum(rows[:-1].abs(), rows[1:].abs())
    least_apart = torch.maximum(apart, line.rounding * size / steps[1:])  # agreement below rounding is chance
    # A result that does not move gives no ratio.
    ratio = (least_apart / larger).nan_to_num(torch.inf, torch.inf, torch.inf)
    found = _stairs(ratio, (steps[:-1] * apart).nan_to_num(0.0, 0.0, 0.0), line.rounding * size)
    stairs = found.least <= COARSE
    if stairs.any():
        stairs &= ~_bends(line, direction, rows, found, stairs)
    least = torch.where(stairs, found.least, ratio.amin(0))  # `min(0)` starts all threads, if only for a few
    best = torch.where(stairs, found.best, ratio.argmin(0))
    least, best = _still(line, direction, rows, least, best)
    plateau = rows.gather(0, best.unsqueeze(0)).squeeze(0)
    noise_at = (steps[1:] * apart).nan_to_num(0.0, 0.0, 0.0)
    finer = torch.arange(len(apart)).unsqueeze(1) >= best.unsqueeze(0)
    settled = torch.where(finer, noise_at, 0.0).amax(0)
    # Where no two steps agree, the function jumps at many points (noise of one size at every step), or at
    # one.
    unsettled = noise_at.median(0).values
    agrees = least <= AGREE
    measured = torch.where(agrees, settled, unsettled)
    slopes = torch.where(agrees, plateau.nan_to_num(0.0, 0.0, 0.0), 0.0)
    beside = measured / torch.maximum(size, slopes.abs())
    precision = _typical(beside[agrees & beside.isfinite()])
    # A moved argument is rounded, too: a step that is short beside its unit is not the step that is made.
    precision = max(precision if precision <= COARSEST else 0.0, line.unit)
    expected = torch.maximum(precision * torch.maximum(size, slopes.abs()), line.rounding * size)
    levels = torch.maximum(measured, expected)
    rounding = float(line.rounding.max()) if line.rounding.numel() else 0.0
    usual = float(slopes.norm()) / max(slopes.numel(), 1) ** 0.5
    finest = _typical(steps.squeeze(1)[best[agrees]])
    return Noise(levels, expected, slopes, usual, max(precision, rounding), _step(expected, slopes, finest))


def _step(expected: Tensor, slopes: Tensor, plateau: float) -> float:
    """Choose the relative step for Richardson's extrapolation, from the noise and from the best plain step.

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


@dataclass(frozen=True)
class _Stairs:
    """Elements of each result that may lie on a staircase.

    Args:
        least: Least relative difference of quotients over many stairs; infinite where there are none.
        best: Index of the step at which it is found.
        edge: Index of the last step that is wider than a tread; -1 where there is none.
    """

    least: Tensor
    best: Tensor
    edge: Tensor


def _stairs(ratio: Tensor, apart: Tensor, rounding: Tensor) -> _Stairs:
    """Find for each result the step over many stairs whose quotient agrees best with its neighbour.

    On a stair whose tread is not level, as of `x * x.float().exp()`, quotients over finer steps agree best,
    but on another value than over many stairs. The value over many stairs is the derivative.

    Args:
        ratio: Relative difference of the quotients of each step and the next one.
        apart: The same difference in the function's own values.
        rounding: Rounding error of each result.
    """
    best = ratio.argmin(0)
    rows = torch.arange(len(ratio)).unsqueeze(1)
    after = torch.maximum(torch.cat([apart[2:], apart[-1:], apart[-1:]]), rounding)
    previous = torch.cat([torch.full_like(apart[:1], torch.inf), apart[:-1]])
    finer = torch.tensor([1.0, *(b / a for a, b in pairwise(STEPS[:-1]))], dtype=torch.float64).unsqueeze(1)
    edge = (apart >= previous * finer**FLAT) & (apart >= DROP * after) & (rows < best)
    last = torch.where(edge, rows, -1).amax(0)
    before = torch.where(rows < last, ratio, torch.inf)
    return _Stairs(before.amin(0), before.argmin(0), last)


def _still(
    line: DirectionalFunction, direction: Tensor, rows: Tensor, least: Tensor, best: Tensor
) -> tuple[Tensor, Tensor]:
    """Take the finer steps for a result that bends, and does not move over them: its slope is zero there.

    Over coarse steps it moves all the same, as a result that is rounded does, which stays as it is.
    """
    last = torch.where(rows != 0, torch.arange(len(rows)).unsqueeze(1), -1).amax(0)
    level = (best <= last) & (last < len(rows) - 1 - INSIDE)
    if level.any():
        level &= _bends(line, direction, rows, _Stairs(least, best, last), level)
    return torch.where(level, 0.0, least), torch.where(level, last + 1, best)


def _bends(
    line: DirectionalFunction, direction: Tensor, rows: Tensor, found: _Stairs, stairs: Tensor
) -> Tensor:
    """Mark results that bend, as a maximum does, and have no stairs: they do not jump.

    The mean of the slopes along a way is the quotient over it, unless there are jumps: on a staircase the
    slopes are those of the treads alone.
    """
    inside = (found.edge + INSIDE).clamp(max=len(STEPS) - 1)
    tread = rows.gather(0, inside.unsqueeze(0)).squeeze(0)
    step = STEPS[int(inside[stairs].max())]
    bends = torch.zeros_like(stairs)
    for way in found.best[stairs].unique().tolist():
        places = [STEPS[way] * ((2 * at + 1) / PLACES - 1) for at in range(PLACES)]
        slopes = torch.stack([_quotient(line, direction, step, place) for place in places])
        far = (slopes - slopes.median(0).values).abs().argmax(0)  # its step may have met the edge of a tread
        kept = slopes.scatter(0, far.unsqueeze(0), 0.0).sum(0) / (PLACES - 1)
        bends |= (found.best == way) & ((kept - rows[way]).abs() < (kept - tread).abs())
    return bends


def _quotient(line: DirectionalFunction, direction: Tensor, step: float, place: float = 0.0) -> Tensor:
    above, below = line.along(direction, place + step), line.along(direction, place - step)
    return (above - below) / (2 * step)


BESIDE = 2.0**-20
"""Largest relative distance of the neighbouring points."""
POINTS = 8
"""Number of neighbouring points."""
TREADS = (2.0**-26, 2.0**-32)
"""Relative steps small enough to stay on one tread."""
WIDE = 2.0**-14
"""A precision coarser than this may be a staircase; functions that round on purpose keep fewer digits."""

SPREAD = 1e-4
"""Derivatives at neighbouring points that differ by more than this fraction may lie across a kink."""

EXACT = 1e-6
"""Relative error of the slope of a tread."""


@dataclass(frozen=True)
class SecondEstimate:
    """Second estimate of a gradient's element, where the first one contradicts the tested gradient."""

    line: DirectionalFunction
    noise: Noise
    generator: torch.Generator

    def excuses(self, coordinate: int, got: float, found: Slope, bound: float) -> bool:
        """Return True if a gradient that differs may be right: by noise, at a kink, or on a staircase.

        Args:
            coordinate: Coordinate of the argument.
            got: The tested value.
            found: The first estimate.
            bound: Its error bound.
        """
        return (
            self._blurred(coordinate, got, found, bound)
            or self._beside(coordinate, got, found)
            or self._on_a_tread(coordinate, got, found, bound)
        )

    @cached_property
    def _levels(self) -> Tensor:
        more = [noise_of(self.line, self.generator).levels for _ in range(2)]
        return torch.stack([self.noise.levels, *more]).amax(0)

    def _blurred(self, coordinate: int, got: float, found: Slope, bound: float) -> bool:
        """Explain the difference by noise, measured along more directions."""
        if not found.is_known:
            return False
        line, own = self.line, self._size(coordinate)
        far = 64 * max(own, line.usual)
        reached = torch.stack([line.at(coordinate, step)[1] != 0 for step in (-1.5 * own, far, -far)]).any(0)
        levels = self._levels[reached] if reached.any() else self._levels
        return abs(got - found.value) <= bound + 2 * NOISES * float(levels.norm()) / found.step

    def _beside(self, coordinate: int, got: float, found: Slope) -> bool:
        """Explain the difference by a kink beside the point."""
        # Points within the step of the estimate: a pole, which that step did not see, must not count as a
        # kink.
        reach = min(BESIDE, found.step / self._size(coordinate) / 64) if found.is_known else BESIDE
        parts = torch.rand(POINTS, self.line.coordinates.numel(), generator=self.generator).double()
        directions = [part * self.line.direction(self.generator) for part in parts]
        near, blur = self._hull(coordinate, directions, reach / 8)
        far, _ = self._hull(coordinate, directions, reach)
        if near is None or far is None:
            return False
        (low, high), room = near, SPREAD * max(map(abs, near)) + blur
        # Derivatives of a smooth function converge as the points do; across a kink they do not.
        kinked = high - low > max(room + 3 * blur, (far[1] - far[0]) / 3)
        return kinked and low - room <= got <= high + room

    def _hull(
        self, coordinate: int, directions: list[Tensor], reach: float
    ) -> tuple[tuple[float, float] | None, float]:
        """Compute the least and the largest derivative at neighbouring points, and their noise."""
        step = reach / 64 * self._size(coordinate)
        slopes: list[float] = []
        for direction in directions:
            slopes.append(self.line.shifted(reach * direction).central(coordinate, step)[0])
        if not all(map(math.isfinite, slopes)):
            return None, 0.0
        return (min(slopes), max(slopes)), NOISES * float(self.noise.levels.norm()) / step

    def _on_a_tread(self, coordinate: int, got: float, found: Slope, bound: float) -> bool:
        """Explain the difference by a staircase, if the gradient is right on one of its treads."""
        own = self._size(coordinate)
        for size in TREADS:
            tread, moved = self.line.central(coordinate, size * own)
            if got == tread == 0:
                return self._staircase
            blur = 2 * NOISES * float((self.line.rounding * self.line.weighed)[moved].norm()) / (size * own)
            if not abs(got - tread) <= blur + EXACT * abs(got):
                return False
            if found.is_known and abs(found.value - tread) <= bound + blur:
                return False
        return True

    @cached_property
    def _staircase(self) -> bool:
        """True if the function is a staircase by design, whose stairs do not shrink with its argument."""
        if self.noise.precision < WIDE:
            return False
        smaller = noise_of(self.line.shifted(-63 / 64 * self.line.coordinates), self.generator)
        return not self.noise.precision / 8 <= smaller.precision <= self.noise.precision * 8

    def _size(self, coordinate: int) -> float:
        return float(self.line.sizes[coordinate]) or self.line.usual
