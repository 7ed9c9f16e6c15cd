"""Agreement of derivatives with differences along a few directions, which settles most at a few calls.

It needs no measured noise: a derivative that is that of plain differences, to almost all of their digits, is
right, and where noise, a kink or a pole keeps differences from that, nothing is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.autodiff import Results
from opsmith.checking.numerics.directional import DirectionalFunction, coordinates

DIRECTIONS = 2
"""Number of random directions along which a gradient is compared."""

STEP = 2.0**-10
"""Relative step along them: its fourth power is far below `SHARE`, and so is rounding divided by it."""

SHARE = 1e-10
"""Largest difference of the derivative, relative to its terms. A function that computes in less than float64
does not come so close."""

KINK = 1e-6
"""Largest kink, relative to the terms: second differences fall with the square of a step where a function is
smooth, and with the step itself at a kink."""


def agrees_along(
    function: Results,
    flat: Sequence[Any],
    argnum: int,
    grads: Sequence[Tensor | None],
    got: Tensor,
    *,
    generator: torch.Generator,
) -> bool:
    """True if a gradient is that of differences along random directions, and there is no kink at the point.

    Every element moves, by a random part of its own size, so that errors do not cancel. False decides
    nothing: `numerical_gradient` measures noise, kinks and each element.

    Args:
        function: Function of flat arguments.
        flat: Arguments, floating ones in float64.
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
    for _ in range(DIRECTIONS):
        parts = 0.5 + torch.rand(given.shape, generator=generator, dtype=torch.float64)
        direction = line.direction(generator) * parts
        terms = given * direction
        if not is_derivative(line, direction, float(terms.sum()), float(terms.abs().sum())):
            return False
    return True


def is_derivative(line: DirectionalFunction, direction: Tensor, got: float, size: float) -> bool:
    """True if a number is the derivative along a direction beyond doubt, and there is no kink at the point.

    Args:
        line: The function of one argument.
        direction: Move of every coordinate, by about its own size.
        got: The number.
        size: Sum of the absolute terms that it is the sum of.
    """
    (coarse, bend), (fine, finer_bend) = (_central(line, direction, step) for step in (STEP, STEP / 2))
    off, kink = abs(got - (4 * fine - coarse) / 3), abs(4 * finer_bend - bend)
    return off <= SHARE * size and kink <= KINK * STEP * size


def _central(line: DirectionalFunction, direction: Tensor, step: float) -> tuple[float, float]:
    """Compute the central difference quotient, and the second difference."""
    above, below = (float(line.along(direction, each).sum()) for each in (step, -step))
    return (above - below) / (2 * step), above + below
