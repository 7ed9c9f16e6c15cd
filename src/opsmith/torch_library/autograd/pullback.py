"""The pullback of a function of tensors: its vector-Jacobian product, to any order, under any transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.random_state import RandomState
from opsmith.torch_library.flattening import ArgumentFlattening
from opsmith.torch_library.symbolic_sizes import for_symbolic_sizes

Pullback = Callable[[Sequence[Tensor | None]], list[Tensor]]
"""Function of a gradient, or None, for each result; returns a gradient for each input."""


def pull_back(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], closed: Sequence[Tensor] = ()
) -> tuple[tuple[Tensor, ...], Pullback]:
    """Run a function, and return its results and its pullback.

    In grad mode, the pullback's gradients are in the graph of `inputs`, of captured tensors (`closed`) and of
    the given gradients, so that derivatives of any order are right. Inside a `torch.func` transform, the
    pullback is one more transform, since tensors there cannot be set to require a gradient.
    """
    # Dynamo can trace `torch.func.vjp`, but not `torch.autograd.grad`.
    if torch.compiler.is_dynamo_compiling() or capabilities.innermost_transform() is not None:
        return _by_transform(function, inputs)
    return _by_autograd(function, inputs, closed)


def _by_autograd(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], closed: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Pullback]:
    higher_order = torch.is_grad_enabled()
    hangs = any(value.requires_grad for value in (*inputs, *closed))
    with torch.enable_grad():
        # A view is a separate tensor for differentiation, and stays in the graph of the original.
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
        return _with_zeros(found, inputs)

    return results, pull


def _by_transform(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Pullback]:
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
        return _with_zeros(vjp(given), inputs)

    return results, pull


def _with_zeros(found: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.zeros_like(value) if gradient is None else gradient
        for gradient, value in zip(found, inputs, strict=True)
    ]


def vjp_by_recompute(
    function: Callable[..., Any],
    flattening: ArgumentFlattening,
    flat: Sequence[Any],
    wanted: Sequence[int],
    grads: Sequence[Tensor | None],
    state: RandomState | None,
) -> list[Tensor]:
    """Gradients of `function` for some of its flat arguments, given the gradients of its results.

    Args:
        function: Takes the operator's arguments, and returns its results.
        flattening: Flattening of the arguments.
        flat: The saved arguments, flat.
        wanted: Positions in `flat` whose gradient is needed.
        grads: Gradient of each flat result, or None.
        state: Random state of the forward, for a random function.

    Returns:
        One gradient for each index in `wanted`; zeros if the function does not depend on that argument.
    """
    others = flat if torch.is_grad_enabled() else map_tensors(capabilities.outside_graph, flat)

    there: list[bool] = []

    def again(*values: Tensor) -> tuple[Tensor, ...]:
        filled = list(others)
        for index, value in zip(wanted, values, strict=True):
            filled[index] = value
        args, kwargs = flattening.schema.split(flattening.pack(filled))
        with state.again() if state else nullcontext():
            results = for_symbolic_sizes(function, filled)(*args, **kwargs)
        results = results if isinstance(results, tuple | list) else (results,)
        spread = [each for one in results for each in (one if isinstance(one, tuple | list) else (one,))]
        there[:] = [each is not None for each in spread]
        return tuple(each for each in spread if each is not None)

    closed = [value for value in others if isinstance(value, Tensor)]
    _, pull = pull_back(again, [flat[index] for index in wanted], closed)
    return pull([grad for grad, is_there in zip(grads, there, strict=True) if is_there])
