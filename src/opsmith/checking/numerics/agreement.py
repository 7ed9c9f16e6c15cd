"""Agreement of derivatives with differences along a few directions, which settles most at a few calls.

It needs no measured noise: a derivative that is that of plain differences, to almost all of their digits, is
right, and where noise, a kink or a pole keeps differences from that, nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.autodiff import Results
from opsmith.checking.numerics.directional import DirectionalFunction, PackedTensors, coordinates
from opsmith.checking.numerics.finite_differences import NumericalGradient, numerical_gradient
from opsmith.core.cached_property import cached_property
from opsmith.judging.compare import Difference, unravel

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
    for _ in range(min(DIRECTIONS, given.numel())):
        parts = 0.5 + torch.rand(given.shape, generator=generator, dtype=torch.float64)
        direction = line.direction(generator) * parts
        terms = given * direction
        size = float(terms.abs().sum())
        (coarse, bend), (fine, finer_bend) = (_central(line, direction, step) for step in (STEP, STEP / 2))
        off, kink = abs(float(terms.sum()) - (4 * fine - coarse) / 3), abs(4 * finer_bend - bend)
        if not (off <= SHARE * size and kink <= KINK * STEP * size):
            return False
    return True


def _central(line: DirectionalFunction, direction: Tensor, step: float) -> tuple[float, float]:
    """Compute the central difference quotient, and the second difference."""
    above, below = (float(line.along(direction, each).sum()) for each in (step, -step))
    return (above - below) / (2 * step), above + below


ALONG = 3
"""Number of random directions that stand for the elements that are not moved one at a time."""


@dataclass(frozen=True)
class Claim:
    """Derivatives of a function by several arguments together, to be held to differences of it.

    Args:
        function: The function of all arguments.
        packed: Its arguments, those that are differentiated by in a row.
        grads: grad_output of each result; None where there is none.
        got: The derivative by each argument of the row; None where autograd has none.
        elements: Number of elements that may be moved one at a time; of none, their sum is known best.
        generator: Makes the source of directions.
    """

    function: Results
    packed: PackedTensors
    grads: Sequence[Tensor | None]
    got: Mapping[int, Tensor | None]
    elements: int
    generator: Callable[[], torch.Generator]

    def by(self, argnum: int) -> Claim:
        """The part of the claim about one argument."""
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
        """True if differences along random directions settle that it is right."""
        flat, generator = [self.packed.row], self.generator()
        return agrees_along(self._of_row, flat, 0, self.grads, self.row, generator=generator)

    @cached_property
    def numbers(self) -> NumericalGradient:
        """The derivatives by differences, in a row."""
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
        """True if differences know the derivatives, and confirm them."""
        return self.numbers.has_estimate and self.worst() is None

    def worst(self, rounding: float = 0.0) -> tuple[int, Difference] | None:
        """The argument by which the derivatives differ most, and the difference; None if all agree.

        Args:
            rounding: Rounding error that each may have besides.
        """
        difference = self.numbers.widened(rounding).judge(self.row)
        if difference is None or not difference.index:
            return None if difference is None else (self.packed.argnums[0], difference)
        argnum, position = self.packed.locate(difference.index[0])
        value = self.packed.values[argnum]
        at = position // 2 if value.is_complex() else position
        return argnum, replace(difference, index=unravel(at, value.shape))

    def kinked(self) -> list[int]:
        """The arguments by which the function has a kink."""
        pieces = self.numbers.kinks.split(self.packed.sizes)
        return [argnum for argnum, piece in zip(self.packed.argnums, pieces, strict=True) if piece.any()]
