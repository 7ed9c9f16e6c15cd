"""Gradients of plain functions, from autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.samples.sample import is_inexact
from opsmith.torch_library.effects import foreign_kind

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

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

    Raises:
        LayoutError: If a gradient is no strided dense tensor.
    """
    with torch.enable_grad():
        leaves = [
            value.detach().requires_grad_(place in places) if is_inexact(value) else value
            for place, value in enumerate(flat)
        ]
        pairs = [
            (result, grad)
            for result, grad in zip(_results(function, leaves), grads, strict=True)
            if grad is not None and with_gradient(result)
        ]
    if not pairs:
        return None
    return dense(
        torch.autograd.grad(
            [result for result, _ in pairs],
            [leaves[place] for place in places],
            [grad for _, grad in pairs],
            allow_unused=True,
        )
    )


def dense(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients as dense tensors: torch takes a sparse one of an input, as that of an embedding's table.

    Raises:
        LayoutError: If one is nested or quantised, which nothing is compared with.

    Example:
        >>> dense([torch.ones(1).to_sparse(), None])
        [tensor([1.]), None]
    """
    found = [each.to_dense() if each is not None and each.layout in SPARSE else each for each in gradients]
    for each in found:
        foreign = None if each is None else foreign_kind(each)
        if foreign is not None:
            raise errors.LayoutError(
                "a gradient comes back that is no strided dense tensor",
                expected="torch.strided",
                got=foreign.name,
                hint=f"return `{foreign.hint.format('gradient')}`",
            )
    return found


IN_PLACE = "leaf Variable that requires grad"
"""What torch says where a function writes into an argument, as it may declare: it takes no leaves."""


def _results(function: Results, leaves: Sequence[Any]) -> Sequence[Tensor]:
    """What a function returns for leaves, or for copies of them that autograd follows."""
    try:
        return function(leaves)
    except RuntimeError as error:
        if IN_PLACE not in str(error):
            raise
    return function([each.clone() if is_inexact(each) and each.requires_grad else each for each in leaves])
