"""Gradients of plain functions, from autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.sample import is_inexact

Results = Callable[[Sequence[Any]], Sequence[Tensor]]


def with_gradient(result: Tensor) -> bool:
    """Whether autograd follows a result."""
    return is_inexact(result) and result.requires_grad


def vjp(
    function: Results, flat: Sequence[Any], places: Sequence[int], grads: Sequence[Tensor | None]
) -> list[Tensor | None] | None:
    """Gradients of a function by its arguments at some places, given those of its results.

    Args:
        function: Takes flat arguments.
        flat: Arguments.
        places: Which arguments to differentiate by.
        grads: Gradient of each result, None where there is none.

    Returns:
        For each place a gradient, or None where autograd has none; None if no result requires a gradient.
    """
    try:
        return _vjp(function, flat, places, grads, copied=False)
    except RuntimeError as error:
        if IN_PLACE not in str(error):
            raise
        return _vjp(function, flat, places, grads, copied=True)


IN_PLACE = "a leaf Variable that requires grad has been used in an in-place operation"
"""What torch says of a leaf that a Function declares, by `mark_dirty`, to write into."""


def _vjp(
    function: Results,
    flat: Sequence[Any],
    places: Sequence[int],
    grads: Sequence[Tensor | None],
    *,
    copied: bool,
) -> list[Tensor | None] | None:
    with torch.enable_grad():
        leaves = [
            value.detach().requires_grad_(place in places) if is_inexact(value) else value
            for place, value in enumerate(flat)
        ]
        values = [value.clone() if copied and is_inexact(value) else value for value in leaves]
        pairs = [
            (result, grad)
            for result, grad in zip(function(values), grads, strict=True)
            if grad is not None and with_gradient(result)
        ]
    if not pairs:
        return None
    return list(
        torch.autograd.grad(
            [result for result, _ in pairs],
            [leaves[place] for place in places],
            [grad for _, grad in pairs],
            allow_unused=True,
        )
    )
