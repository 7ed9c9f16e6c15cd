"""Cuts of the graph: refuse a derivative that would be zero because torch does not see a computation.

It is refused when it is requested: a node passes on values with a graph, and raises for values without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula
from opsmith.core.location import where
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.gradient_values import has_gradient
from opsmith.torch_library.autograd.node import NodeContext, TransformedNode, needs_of, node_class, through
from opsmith.torch_library.autograd.pullback import pull_back
from opsmith.torch_library.flattening import Flat


def refuse_differentiation(
    answers: Sequence[Any], sources: Sequence[Any], error: errors.OpsmithError
) -> list[Any]:
    """Return the values; differentiating a tensor among them with respect to a source raises `error`."""
    tensors = tensors_in(list(sources))
    return [
        _attached(answer.detach(), tensors, partial(copy, error)) if isinstance(answer, Tensor) else answer
        for answer in answers
    ]


def _attached(
    value: Tensor,
    sources: Sequence[Tensor],
    error: Callable[[], errors.OpsmithError],
    *,
    forward_only: bool = False,
) -> Tensor:
    attached: Tensor = through(_NODE.apply, Refusal(error, forward_only), value, *sources)[0]
    return attached


@dataclass(frozen=True, eq=False)
class Refusal:
    """The rule of a node between a value and its sources.

    Differentiating the node raises an error if a source has a graph or a tangent, but the value has none.
    Each level of autograd and `torch.func` is tested.

    Args:
        error: Makes the error.
        forward_only: True if only a missing tangent is refused.
    """

    error: Callable[[], errors.OpsmithError]
    forward_only: bool

    def compute(self, flat: Flat) -> Flat:
        """Return the value, which comes before its sources."""
        return (flat[0].clone(),)

    def keep(self, ctx: NodeContext, flat: Flat, results: Flat) -> None:
        """Keep no tensors."""
        ctx.materialize_grads, ctx.to_save = False, ()

    def backward(self, ctx: NodeContext, grads: Flat) -> Flat:
        """Pass the gradient on to the value, or refuse."""
        needed, *others = needs_of(ctx)
        if not (grads[0] is None or self.forward_only or needed):
            # Made anew: a raised error gets a traceback, which keeps the result, and so this node, alive.
            raise self.error()
        return grads[0], *[None] * len(others)

    def tangents(self, ctx: NodeContext, tangents: Flat) -> Flat:
        """Pass the tangent on, or refuse."""
        if tangents[0] is None:
            raise self.error()
        return (tangents[0].clone(),)


_NODE = node_class("Refusal", TransformedNode)


_CUT: set[int] = set()
"""Functions that called an operator without a derivative, by `id`, since some functions have no hash.

A function that gets the `id` of a deleted one takes the slow path unnecessarily.
"""


def is_cut(function: Callable[..., Any]) -> bool:
    """Return True if a function has called an operator without a derivative."""
    return id(function) in _CUT


def refusing_cuts(
    subject: errors.ErrorSubject, function: Callable[..., Any], what: str, *, derived: bool = False
) -> AbstractContextManager[Any]:
    """Context in which differentiating the results of operators without autograd raises an error.

    Under `torch.func` these results would be constants, like the results of a kernel that uses code outside
    torch. In forward mode, the results of operators without forward mode would be constants, too.

    Args:
        subject: Opsmith's operator.
        function: The formula, reference or method that runs in the context.
        what: Description of this function.
        derived: True if it is differentiated within the context.
    """
    asked = derived or torch.is_grad_enabled() or capabilities.forward_mode_active()
    if not asked or torch.compiler.is_dynamo_compiling():
        return nullcontext()

    def call(called: Any, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        transformed = capabilities.innermost_transform() is not None
        differentiable = None if overload is None else capabilities.has_derivative(overload, transformed)
        forward_mode = capabilities.forward_mode_active()
        if differentiable is None or (differentiable and not forward_mode):
            return called(*args, **kwargs)
        if not differentiable:
            _CUT.add(id(function))
        sources = [each for each in tensors_in([*args, *kwargs.values()]) if has_gradient(each.dtype)]
        if transformed and not differentiable:
            args = tuple(map_tensors(Tensor.detach, args))
            kwargs = dict(zip(kwargs, map_tensors(Tensor.detach, kwargs.values()), strict=True))
        results = called(*args, **kwargs)

        def attached(value: Tensor) -> Tensor:
            recorded = differentiable or (not transformed and _is_recorded(value))
            if not (sources and has_gradient(value.dtype)) or (recorded and not forward_mode):
                return value
            if value.requires_grad and not recorded:
                value = capabilities.outside_graph(value)
            return _attached(value, sources, partial(error, overload.name()), forward_only=recorded)

        return map_tensors(attached, [results])[0]

    def error(name: str) -> errors.GraphCutError:
        packet = f"torch.ops.{name.removesuffix('.default').replace('::', '.')}"
        return subject.error(
            errors.GraphCutError,
            f"{what} calls `{name}`; torch does not know its derivative and would use zero",
            where=where(function),
            hint=f"adopt it, with the mathematics in plain PyTorch: `opsmith.adopt({packet}, reference=...)`",
        )

    return capabilities.around_operators(call)


_RAISING = ("torch::autograd::WarnNotImplemented", "GeneratedBackwardFor_")
"""Names of nodes that torch makes for operators without autograd, in C++ and for a `custom_op`."""


def _is_recorded(value: Tensor) -> bool:
    """Return True if autograd recorded a kernel's computation, as it records torch operations in it."""
    name = "" if value.grad_fn is None else value.grad_fn.name()
    return name != "" and not name.startswith(_RAISING)


def refuse_graph_cut(
    specification: Specification,
    formula: Formula,
    label: str,
    gradient: Tensor,
    arguments: dict[str, Any],
    find: Callable[[Any], Any],
) -> Tensor:
    """Return a gradient from `create_graph=True`; if it lost the graph, differentiating it raises an error.

    A gradient is linear in `grad`. So a gradient that does not require a gradient itself, although `grad`
    does, was computed outside torch. If `grad` is a constant, this cannot be seen: then the formula runs once
    more with a `grad` that requires a gradient.

    Args:
        specification: The operator.
        formula: The formula.
        label: Name of the input, in messages.
        gradient: The gradient in question.
        arguments: Arguments of the formula.
        find: Finds this gradient in the value that the formula returns.
    """
    if gradient.requires_grad:
        return gradient
    incoming = {
        keyword: arguments[keyword]
        for keyword, name in zip(formula.keywords, formula.parameters, strict=True)
        if name in specification.schema.gradient_position and isinstance(arguments[keyword], Tensor)
    }
    given = list(incoming.values())
    sources = [tensor for tensor in tensors_in(list(arguments.values())) if tensor.requires_grad]
    # A batch of gradients has no graph, and code outside torch raises an error for it.
    if not (given and sources) or any(map(capabilities.is_gradient_batch, given)):
        return gradient
    if not any(tensor.requires_grad for tensor in given):
        with refusing_cuts(specification, formula.function, f"the gradient of `{label}`", derived=True):
            depends = _depends_on_grads(formula, incoming, arguments, find)
        if depends:
            return gradient
    error = specification.error(
        errors.GraphCutError,
        f"torch cannot see that the gradient of `{label}` depends on `{next(iter(incoming))}`",
        argument=label,
        where=formula.where,
        hint="write the formula with torch operations or opsmith operators: then a second-order gradient "
        "exists; if the gradient is zero, give `opsmith.zero`",
    )
    refused: Tensor = refuse_differentiation([gradient], sources, error)[0]
    return refused


def _depends_on_grads(
    formula: Formula, incoming: dict[str, Any], arguments: dict[str, Any], find: Callable[[Any], Any]
) -> bool:
    """Return True if autograd sees that a formula's result depends on the output gradients."""
    seen: list[bool] = []

    def again(*grads: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(incoming, grads, strict=True))
        answer = find(formula.function(**{**arguments, **given}))
        seen.append(isinstance(answer, Tensor) and answer.requires_grad)
        return tuple(tensors_in([answer]))

    pull_back(again, list(incoming.values()))
    return seen[0]
