"""How much a function's values jitter, whatever it computes in: measured, and not read off a dtype.

A function that computes in float32, or in half, although float64 comes in, has values on a staircase: over a
step below the width of a stair it does not move at all, or by a whole stair. So the precision of an operator
shows when its difference quotients over steps from 1/4 of its arguments down to their last bits are laid side
by side: they agree best at some step, and over finer ones they leave that value by the noise over the step
(after J. J. Moré and S. M. Wild, "Estimating computational noise", SIAM J. Sci. Comput., 2011).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opsmith.checking.line import Line

STEPS = tuple(2.0**-exponent for exponent in range(2, 47, 3))
AGREE = 0.3
"""Quotients over two neighbouring steps that differ by more than this fraction do not agree."""

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
    apart = (rows[:-1] - rows[1:]).abs()
    larger = torch.maximum(rows[:-1].abs(), rows[1:].abs())
    ratio = (apart / larger).nan_to_num(torch.inf, torch.inf, torch.inf)  # what stays agrees with nothing
    least, best = ratio.min(0)
    plateau = rows.gather(0, best.unsqueeze(0)).squeeze(0)
    finer = torch.arange(len(STEPS)).unsqueeze(1) > best.unsqueeze(0)
    left = (steps * (rows - plateau).abs()).nan_to_num(0.0, 0.0, 0.0)
    settled = torch.where(finer, left, 0.0).max(0).values
    # Where no two steps agree, it jumps here and there (noise of the same size at every step), or but once.
    unsettled = (steps[1:] * apart).nan_to_num(0.0, 0.0, 0.0).median(0).values
    agrees = least <= AGREE
    measured = torch.where(agrees, settled, unsettled)
    slopes = torch.where(agrees, plateau.nan_to_num(0.0, 0.0, 0.0), 0.0)
    size = line.weighed.abs()
    beside_size = measured / torch.maximum(size, slopes.abs())
    known = beside_size[beside_size.isfinite()]
    precision = float(known.quantile(TYPICAL)) if known.numel() else 0.0
    expected = torch.maximum(precision * torch.maximum(size, slopes.abs()), line.rounding * size)
    levels = torch.maximum(measured, expected)
    moves, jitter = float(slopes.norm()), float(levels.norm())
    beside = jitter / moves if moves else 0.0
    step = min(max(beside**0.2, 2.0**-11), 2.0**-2) if moves else 2.0**-10
    usual = moves / max(slopes.numel(), 1) ** 0.5
    rounding = float(line.rounding.max()) if line.rounding.numel() else 0.0
    return Noise(levels, expected, slopes, usual, max(precision, rounding), step)


def _quotient(line: Line, direction: Tensor, step: float) -> Tensor:
    above, below = line.along(direction, step), line.along(direction, -step)
    return (above - below) / (2 * step)
