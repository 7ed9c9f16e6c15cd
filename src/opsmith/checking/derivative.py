"""Gradients of plain functions: from autograd, and from finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.sample import is_inexact

Results = Callable[[Sequence[Any]], Sequence[Tensor]]

STEP = 1e-6
"""The step of `torch.autograd.gradcheck`, near the cube root of float64's eps."""


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
    with torch.enable_grad():
        leaves = [
            value.detach().requires_grad_(place in places) if is_inexact(value) else value
            for place, value in enumerate(flat)
        ]
        pairs = [
            (result, grad)
            for result, grad in zip(function(leaves), grads, strict=True)
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


def finite_difference(
    function: Results, flat: Sequence[Any], place: int, grads: Sequence[Tensor | None]
) -> Tensor:
    """The gradient by one argument, in float64, from central differences of each of its elements.

    A complex argument is moved along both axes; the answer follows torch's convention, in which the gradient
    of a real-valued f is df/d(re) + i df/d(im).
    """
    base = flat[place].detach().contiguous()
    gradient = torch.zeros_like(base)
    axes = (1.0, 1j) if base.is_complex() else (1.0,)
    for position in range(base.numel()):
        for axis in axes:
            moved = []
            for sign in (1, -1):
                other = base.clone()
                other.view(-1)[position] += sign * STEP * axis
                values = [other if at == place else value for at, value in enumerate(flat)]
                moved.append(_inner(function(values), grads))
            gradient.view(-1)[position] += axis * (moved[0] - moved[1]) / (2 * STEP)
    return gradient


def _inner(results: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> float:
    """The real inner product of results and their gradients."""
    total = 0.0
    for result, grad in zip(results, grads, strict=True):
        if grad is not None and result is not None:
            total += float((result.detach() * grad.conj()).real.sum())
    return total
