"""The pullback of a function of tensors: its vector-Jacobian product, to any order, under any transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.torch_library import capabilities

Pull = Callable[[Sequence[Tensor | None]], list[Tensor]]
"""Takes a gradient, or None, for each result; gives one for each input, zeros where nothing depends on it."""


def pull_back(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], closed: Sequence[Tensor] = ()
) -> tuple[tuple[Tensor, ...], Pull]:
    """Run a function and return its results with its pullback.

    Where grad mode is on, the pullback's answers hang in the graph of `inputs`, of what the function closes
    over (`closed`) and of the gradients given: any order of derivative is right. Inside a `torch.func`
    transform it is one more of them, since tensors there cannot be asked to require a gradient.
    """
    # A compiled backward can follow `torch.func.vjp`, and not `torch.autograd.grad`.
    if torch.compiler.is_dynamo_compiling() or capabilities.innermost_layer() is not None:
        return _by_transform(function, inputs)
    return _by_autograd(function, inputs, closed)


def _by_autograd(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], closed: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Pull]:
    higher_order = torch.is_grad_enabled()
    hangs = any(value.requires_grad for value in (*inputs, *closed))
    with torch.enable_grad():
        # A view is a new tensor to differentiate by, and still hangs in the graph of the original.
        leaves = [
            value.view_as(value)
            if higher_order and value.requires_grad
            else capabilities.outside_graph(value).requires_grad_()
            for value in inputs
        ]
        results = function(*leaves)

    def pull(grads: Sequence[Tensor | None]) -> list[Tensor]:
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        create_graph = higher_order and (hangs or any(grad.requires_grad for _, grad in pairs))
        if pairs and leaves:
            found = torch.autograd.grad(
                [result for result, _ in pairs],
                leaves,
                [grad for _, grad in pairs],
                create_graph=create_graph,
                retain_graph=True,
                allow_unused=True,
            )
        return _filled(found, inputs)

    return results, pull


def _by_transform(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Pull]:
    with torch.enable_grad():
        floating: list[bool] = []

        def differentiable(*values: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            results = function(*values)
            floating[:] = [result.is_floating_point() or result.is_complex() for result in results]
            return (
                tuple(result for result, kept in zip(results, floating, strict=True) if kept),
                results,
            )

        transformed: Any = torch.func.vjp(differentiable, *inputs, has_aux=True)
        _, vjp, results = transformed

    def pull(grads: Sequence[Tensor | None]) -> list[Tensor]:
        given = tuple(
            torch.zeros_like(result) if grad is None else grad
            for result, grad, kept in zip(results, grads, floating, strict=True)
            if kept
        )
        return _filled(vjp(given), inputs)

    return results, pull


def _filled(found: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.zeros_like(value) if gradient is None else gradient
        for gradient, value in zip(found, inputs, strict=True)
    ]
