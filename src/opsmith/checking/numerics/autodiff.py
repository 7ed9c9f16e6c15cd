"""Gradients of plain functions, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.processes.watchdog import beat
from opsmith.judging.tensors import dense, is_inexact
from opsmith.torch_library import capabilities
from opsmith.torch_library.torch_messages import LEAF_WRITTEN, has_message

Results = Callable[[Sequence[Any]], Sequence[Tensor]]


def has_gradient(result: Tensor | None) -> bool:
    """Return True if autograd computes a gradient for a result."""
    return result is not None and is_inexact(result) and result.requires_grad


def vjp(
    function: Results, flat: Sequence[Any], argnums: Sequence[int], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Compute the gradients of a function with respect to some arguments; None if autograd has none.

    Args:
        function: Function of flat arguments.
        flat: Arguments.
        argnums: Positions of the arguments to differentiate with respect to.
        grads: grad_output of each result; None for a result without one.

    Raises:
        LayoutError: If a gradient is not a strided dense tensor.
    """
    leaves, _, results = record(function, flat, argnums)
    return differentiate(results, [leaves[argnum] for argnum in argnums], grads)


def differentiate(
    results: Sequence[Any], inputs: Sequence[Tensor], grads: Sequence[Tensor | None], **options: bool
) -> list[Tensor | None]:
    """Compute the gradients of recorded results by some leaves; None if autograd has none.

    Results without a gradient, and results whose grad_output is None, are left out. Options are those of
    `torch.autograd.grad`.
    """
    pairs = [
        (result, grad)
        for result, grad in zip(results, grads, strict=True)
        if grad is not None and has_gradient(result)
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    outputs, grad_outputs = zip(*pairs, strict=True)
    beat()
    found = capabilities.differentiated(outputs, inputs, grad_outputs, **options)
    beat(returned=True)
    return dense(found)


def differentiate_by_ones(results: Sequence[Any], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Compute the gradients of recorded results, as `differentiate` does, for a grad_output of ones."""
    ones = [torch.ones_like(each) if has_gradient(each) else None for each in results]
    return differentiate(results, inputs, ones)


def vjp_or_zeros(
    function: Results, flat: Sequence[Any], argnums: Sequence[int], grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """Compute gradients like `vjp`, with zeros where autograd has none.

    The gradients are nan if a result and its grad_output differ in size, as for `x[x > 0]` at new numbers.
    """
    leaves, _, results = record(function, flat, argnums)
    if any(
        has_gradient(result) and grad is not None and result.shape != grad.shape
        for result, grad in zip(results, grads, strict=True)
    ):
        return [torch.full_like(flat[argnum], torch.nan) for argnum in argnums]
    found = differentiate(results, [leaves[argnum] for argnum in argnums], grads)
    return [
        torch.zeros_like(flat[argnum]) if gradient is None else gradient
        for argnum, gradient in zip(argnums, found, strict=True)
    ]


def record(
    call: Callable[[list[Any]], Any], flat: Sequence[Any], argnums: Sequence[int], *, leaf: bool = True
) -> tuple[list[Any], list[Any], Any]:
    """Call a function under autograd.

    A function that writes into an argument cannot take leaves: it gets copies that autograd records.

    Args:
        call: Function of flat arguments.
        flat: Flat arguments; the leaves share their memory.
        argnums: The arguments that require a gradient.
        leaf: True to pass the leaves themselves, if the function takes them.

    Returns:
        The leaves, the passed arguments, and the result of the call.

    Example:
        >>> leaves, _, result = record(lambda flat: flat[0].mul_(2), [torch.ones(2)], [0])
        >>> torch.autograd.grad(result.sum(), leaves)
        (tensor([2., 2.]),)
    """
    with torch.enable_grad():
        leaves = [
            value.detach().requires_grad_(argnum in argnums) if is_inexact(value) else value
            for argnum, value in enumerate(flat)
        ]
        if leaf:
            before = [leaves[argnum].detach().clone() for argnum in argnums]
            try:
                return leaves, leaves, call(leaves)
            except RuntimeError as error:
                if not has_message(error, LEAF_WRITTEN):
                    raise
            for argnum, value in zip(argnums, before, strict=True):
                leaves[argnum].detach().copy_(value)  # torch refuses the call only after it has written
        given = [each.clone() if argnum in argnums else each for argnum, each in enumerate(leaves)]
        return leaves, given, call(given)
