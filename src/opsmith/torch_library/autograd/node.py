"""The autograd node: one class for each operator, which runs the rule that a call hands to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from opsmith.torch_library import capabilities
from opsmith.torch_library.flattening import Flat


class NodeContext(Protocol):
    """The part of a node's context that rules use, under torch's own names.

    Attributes:
        to_save: Tensors that autograd saves for the backward.
        saved_for_forward: Tensors for the tangents.
        non_differentiable: Results that have no gradient.
        dirty_tensors: Arguments that were written into.
        materialize_grads: True if a missing gradient is passed as zeros.
        needs_input_grad: True for each argument of `apply` whose gradient is needed; see `needs_of`.
        kept: Values other than tensors that the rule keeps for its backward.
    """

    to_save: tuple[Tensor | None, ...] | None
    saved_for_forward: tuple[Tensor | None, ...] | None
    non_differentiable: tuple[Tensor, ...] | None
    dirty_tensors: tuple[Tensor, ...] | None
    materialize_grads: bool
    needs_input_grad: tuple[bool, ...]
    kept: Any

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The saved tensors."""
        ...


class BackwardRule(Protocol):
    """Derivatives of a node. They are kept with the graph, and contain no tensors."""

    def backward(self, ctx: NodeContext, grads: Flat) -> Flat:
        """Gradients of the flat arguments."""
        ...

    def tangents(self, ctx: NodeContext, tangents: Flat) -> Flat:
        """Tangents of the results, at the level of `torch.autograd.forward_ad`."""
        ...


class Rule(BackwardRule, Protocol):
    """A computation of a node, and its derivatives."""

    def forward(self, ctx: NodeContext, flat: Flat) -> Flat:
        """Compute the flat results of flat arguments, and save the values that the backward needs."""
        ...


class SplitRule(BackwardRule, Protocol):
    """A rule whose forward has two parts, as torch's own transforms require."""

    def compute(self, flat: Flat) -> Flat:
        """Compute the flat results of flat arguments."""
        ...

    def keep(self, ctx: NodeContext, flat: Flat, results: Flat) -> None:
        """Save the values that the backward needs."""
        ...


class _Raised(threading.local):
    """The exception that a rule has raised in the forward of a node."""

    error: BaseException | None = None

    def take(self) -> BaseException:
        """Return the exception, and forget it."""
        error, self.error = self.error, None
        assert error is not None
        return error


_RAISED = _Raised()


def _noting(compute: Callable[..., Flat], *arguments: Any) -> Flat:
    """Compute, and note an exception that is raised."""
    try:
        return compute(*arguments)
    except BaseException as error:
        _RAISED.error = error
        raise


class RunsRule:
    """Methods of a node whose `apply` takes a `Rule` and the flat arguments."""

    @staticmethod
    def forward(ctx: Any, rule: Any, *flat: Any) -> Flat:
        """Compute by the rule."""
        ctx.rule = rule
        return _noting(rule.forward, ctx, flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Run the backward of the rule."""
        return None, *ctx.rule.backward(ctx, grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        """Tangents by the rule; a single tangent comes without a tuple."""
        answers = ctx.rule.tangents(ctx, tangents)
        return answers if len(answers) > 1 else answers[0]


class Node(RunsRule, torch.autograd.Function):
    """A node of ordinary autograd."""


class TransformedNode(RunsRule, torch.autograd.Function):
    """A node that torch's own transforms support; it takes a `SplitRule`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rule: Any, *flat: Any) -> Flat:  # type: ignore[override]  # it has `setup_context`
        """Compute by the rule."""
        return _noting(rule.compute, flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Flat) -> None:
        """Save by the rule."""
        ctx.rule, *flat = inputs
        ctx.rule.keep(ctx, tuple(flat), output)
        ctx.save_for_backward(*ctx.to_save)  # torch's context for `vmap` notes the dimensions of batches


def node_class(name: str, base: type[RunsRule]) -> Any:
    """Class of the nodes of an operator, with a name that appears in the graph.

    Args:
        name: Name of the operator.
        base: `Node`, or the base for one level of `torch.func`, or for torch's own transforms.
    """
    return type(name, (base,), {})


def through(apply: Callable[..., Any], *arguments: Any) -> Any:
    """Compute with the `apply` of a node, and raise the exception that its rule raised.

    torch may warn after a node that has raised an exception. Python then raises a `SystemError`, which may
    have lost its cause.
    """
    try:
        return apply(*arguments)
    except BaseException:
        if _RAISED.error is None:
            raise
    raise _RAISED.take()  # in no variable: its traceback keeps this frame alive


def needs_of(ctx: NodeContext) -> tuple[bool, ...]:
    """Return True for each flat argument whose gradient is needed, without the rule before them."""
    return ctx.needs_input_grad[1:]


class BoundNode:
    """The node of one rule, with less work in each call than a node of `node_class`.

    Args:
        name: Name of the operator.
        rule: Its `forward` takes a context and argument values, one by one; its `backward` a context and the
            gradients of all results. Arguments that it marks as dirty are not views.
        recorded_operator: The operator to find in the graph.
        of_class: For an adopted class, the parts of its node that the backward in C++ uses; else None.
        in_cpp: False for a node of torch's own class, even if calls in C++ are built.

    Attributes:
        node: The class.
        apply: Its `apply`.
    """

    def __init__(
        self,
        name: str,
        rule: Any,
        recorded_operator: Any,
        of_class: tuple[Any, ...] | None = None,
        *,
        in_cpp: bool = True,
    ) -> None:
        compute, go_back = rule.forward, rule.backward
        in_cpp = in_cpp and capabilities.calls_in_cpp() is not None

        def noting(ctx: Any, *values: Any) -> Any:
            try:
                return compute(ctx, *values)
            except BaseException as error:
                _RAISED.error = error
                raise

        def backward(ctx: Any, *grads: Any) -> Any:  # a function, which torch binds to the context
            return go_back(ctx, grads)

        forward = compute if in_cpp else noting  # C++ passes errors on unchanged
        functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        base = torch.autograd.Function
        self.node: Any = type(name, (base,), {**functions, "recorded_operator": recorded_operator})
        capabilities.direct_backward(self.node, backward)
        self.apply: Callable[..., Any] = (
            capabilities.recorder(self.node, of_class)
            if in_cpp
            else partial(through, capabilities.direct_apply(self.node))
        )
