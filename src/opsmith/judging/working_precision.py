"""Working precision: the dtype that a function computes in, measured by how its results move.

A function may take float64, return float64, and compute in float32 in between: it casts its arguments, or a
kernel sums in `float`. Rounding then leaves stairs in its results. Where its arguments move along a line by a
few stairs, results leave a straight line by the rounding error of float32, whatever the step. Those of a
function that computes in float64 leave it by a curve, which falls with the square of the step, or at a kink,
which falls with the step itself (after J. J. Moré and S. M. Wild, "Estimating computational noise", SIAM J.
Sci. Comput., 2011).

Precisions below float32 are not measured: their rounding cannot be told from the curve of a smooth function.
`noise` measures any precision, along one argument, by ten times as many runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.judging.compare import in_double
from opsmith.judging.tensors import is_inexact, replica

FINE, COARSE = 2.0**-22, 2.0**-18
"""Relative steps: four roundings of float32, and 64. A curve is `COARSE**2`, a thousandth of a rounding."""

POINTS = (0.37, 1.0, 2.3)
"""Multiples of a step, not symmetric, at which a function is run: rounding is symmetric."""

DRAWS = 3
"""Number of random directions: an element may be exact along one."""

LEAST, MOST = 2.0**-28, 2.0**-19
"""Rounding of float32, 2**-24, relative to what moves an element: less is of float64, and more is a jump."""

UNDERFLOW = torch.finfo(torch.float32).tiny
"""Size below which numbers of float32 have few digits."""

STEEP = LEAST / COARSE**2
"""Largest relative move of an element per relative step: the curve of what moves more hides rounding."""

STEADY = 8.0
"""Largest ratio of the deviations for coarse and for fine steps: about 1 for rounding, 16 at a kink."""


Function = Callable[[list[Any]], Sequence[Tensor | None]]


def working_precision(function: Function, flat: Sequence[Any], generator: torch.Generator) -> torch.dtype:
    """Measure the precision that a function computes in.

    Args:
        function: Takes flat arguments.
        flat: The arguments, floating ones in float64.
        generator: Source of the directions.

    Returns:
        float64, or float32 if at least a part of a result is computed in it.

    Example:
        >>> x = torch.rand(9, dtype=torch.float64)
        >>> functions = lambda flat: [flat[0].exp()], lambda flat: [flat[0].float().exp().double()]
        >>> [working_precision(each, [x], torch.Generator().manual_seed(0)) for each in functions]
        [torch.float64, torch.float32]
    """
    fine: list[Tensor] = []
    coarse: list[Tensor] = []
    for _ in range(DRAWS):
        directions = [_direction(value, generator) for value in flat]
        for step, found in ((FINE, fine), (COARSE, coarse)):
            off = _deviations(function, flat, directions, step)
            if off is None:
                return torch.float64
            found.append(off)
            if not (off >= LEAST).any():
                break
    if not coarse:
        return torch.float64
    near, far = (torch.stack(found).amax(0) for found in (fine, coarse))
    told = bool(((near >= LEAST) & (near <= MOST) & (far <= STEADY * near)).any())
    return torch.float32 if told else torch.float64


def _direction(value: Any, generator: torch.Generator) -> Tensor | None:
    """Draw the relative move of each number, up or down by about as much as any other."""
    if not is_inexact(value):
        return None
    parts = 0.75 + 0.5 * torch.rand(value.shape, generator=generator, dtype=torch.float64)
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (parts * signs).to(value.device)


def _deviations(
    function: Function, flat: Sequence[Any], directions: Sequence[Tensor | None], step: float
) -> Tensor | None:
    """Compute how far three points of each floating number lie off a line.

    It is relative to the number and what moves it, and zero where a curve would hide rounding. None where
    they cannot be compared, as where a shape depends on the numbers.
    """
    first, second, third = POINTS
    runs: list[list[Tensor]] = []
    for part in POINTS:
        moved = [
            replica(value) if along is None else value * (1 + part * step * along)
            for value, along in zip(flat, directions, strict=True)
        ]
        runs.append([in_double(each) for each in function(moved) if each is not None and is_inexact(each)])
    if not runs[0] or len({tuple(each.shape for each in run) for run in runs}) > 1:
        return None
    low, middle, high = (torch.cat([each.reshape(-1) for each in run]) for run in runs)
    expected = low + (middle - low) * ((third - first) / (second - first))
    size, moves = low.abs() + UNDERFLOW, (high - low).abs() / (step * (third - first))
    off = (high - expected).abs().nan_to_num(0.0, 0.0, 0.0)
    return (off / (size + moves)).masked_fill(moves > STEEP * size, 0.0).nan_to_num(0.0, 0.0, 0.0)
