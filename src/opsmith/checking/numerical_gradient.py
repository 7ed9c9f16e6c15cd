"""The derivative of a function from its values alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.derivative import Results, finite_difference
from opsmith.checking.difference import Difference, off_gradcheck


@dataclass(frozen=True)
class NumericalGradient:
    """Finite differences by one input.

    Args:
        values: The gradient, in float64.
        kinks: Elements at which the one-sided derivatives differ.
    """

    values: Tensor
    kinks: Tensor

    def judge(self, got: Tensor) -> Difference | None:
        """The element of a gradient that is furthest off, if one is wrong."""
        return off_gradcheck(got, self.values)


def numerical_gradient(
    function: Results,
    flat: Sequence[Any],
    place: int,
    grads: Sequence[Tensor | None],
    *,
    elements: int,
    generator: torch.Generator,
) -> NumericalGradient:
    """The gradient by one argument, in float64."""
    values = finite_difference(function, flat, place, grads)
    return NumericalGradient(values, torch.zeros(values.shape, dtype=torch.bool))
