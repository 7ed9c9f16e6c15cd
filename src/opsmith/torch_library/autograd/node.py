"""The autograd node of an operator: it saves what the needed formulas name, and runs them in the backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autocast import autocast_in_force
from opsmith.torch_library.autograd.forward_mode import jvp
from opsmith.torch_library.autograd.gradient_values import CallMetadata, constant_results
from opsmith.torch_library.autograd.random_state import RandomState, generators_in
from opsmith.torch_library.autograd.saved_values import SavedValues, save_values
from opsmith.torch_library.autograd.vjp import Vjp
from opsmith.torch_library.contract import run_call
from opsmith.torch_library.flattening import ArgumentFlattening, Flat, ResultFlattening, lengths_of

VjpFunction = Callable[[Mapping[str, Any], Sequence[Tensor | None]], list[Tensor | None]]
"""Function of saved values by name and the gradient of each result; returns that of each flat argument."""


class RegisteredOperator(Protocol):
    """The part of a registration that a call uses."""

    specification: Specification

    def call_whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call it through the dispatcher, and return its hidden results, too."""
        ...

    @property
    def node(self) -> Any:
        """The class of its autograd node."""
        ...

    def plan(self, needed: frozenset[str]) -> BackwardPlan:
        """The backward for these inputs."""
        ...

    def result_flattening(self, lengths: tuple[int | None, ...]) -> ResultFlattening:
        """Flat form of results with lists of these lengths."""
        ...


class Primitive(ABC):
    """A differentiable operation with VJP, JVP and batching: an operator, or one under a `vmap` level.

    Args:
        registered: The operator.
        flattening: Flat form of its arguments.

    Attributes:
        specification: The specification of the operator.
        node: The class of its autograd node.
        plan: Function that plans the backward for some inputs, those of one example.
    """

    def __init__(self, registered: RegisteredOperator, flattening: ArgumentFlattening) -> None:
        self.registered, self.flattening = registered, flattening
        self.specification, self.node, self.plan = registered.specification, registered.node, registered.plan
        self._results = registered.result_flattening((None,) * len(self.specification.schema.results))

    @property
    def results(self) -> ResultFlattening:
        """Flat form of its results; where there are lists, known after the first computation."""
        return self._results

    def save(
        self, save: Callable[..., None], names: Sequence[str], flat: Sequence[Any], results: Sequence[Any]
    ) -> SavedValues:
        """Save arguments and results by name; see `save_values`."""
        return save_values(save, names, self.flattening, flat, results, self.results)

    def through(self, node: Any, leading: Any, flat: Sequence[Any]) -> Flat:
        """Compute all results through a node, and raise what that raises.

        Torch warns after a node, also where the node has raised, and Python makes a `SystemError` of that.
        """
        try:
            results: Flat = node.apply(self, leading, *flat)
        except SystemError as error:
            raised = error.__cause__ or error
            raise raised from raised.__cause__
        return results

    @abstractmethod
    def example(self, flat: Sequence[Any]) -> Flat:
        """Compute all results by the reference, for tensors that may carry a batch."""

    @abstractmethod
    def below(self, flat: Sequence[Any]) -> Flat:
        """Compute all results below autograd."""

    @abstractmethod
    def vjp(self, plan: BackwardPlan, metadata: CallMetadata, state: RandomState | None) -> VjpFunction:
        """The vector-Jacobian product of a call with this metadata."""

    @abstractmethod
    def jvp(self, every: Mapping[str, Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Tangents of the results, from all arguments and results by name and tangents of flat arguments."""


class OperatorPrimitive(Primitive):
    """An operator, for calls with lists of given lengths."""

    def _flat(self, results: tuple[Any, ...]) -> Flat:
        if self.specification.schema.always_tensors:
            return results
        self._results = self.registered.result_flattening(lengths_of(results))
        return self._results.flatten(results)

    def call(self, flat: Sequence[Any]) -> Flat:
        """Compute all results, through the dispatcher."""
        args, kwargs = self.specification.schema.dispatched(self.flattening.pack(flat))
        results = self.registered.call_whole(args, kwargs)
        return self._flat(results if isinstance(results, tuple) else (results,))

    def below(self, flat: Sequence[Any]) -> Flat:
        """Compute all results below autograd."""
        with capabilities.below_autograd():
            return self.call(flat)

    def example(self, flat: Sequence[Any]) -> Flat:
        """Compute all results by the reference, for tensors that may carry a batch."""
        specification = self.specification
        return self._flat(run_call(specification, specification.computed_by, self.flattening.pack(flat)))

    def vjp(self, plan: BackwardPlan, metadata: CallMetadata, state: RandomState | None) -> VjpFunction:
        """The vector-Jacobian product of a call with this metadata."""
        autocast = None if self.specification.origin.casts else autocast_in_force()
        return Vjp(self.specification, plan, self.flattening, self.results, metadata, state, autocast)

    def jvp(self, every: Mapping[str, Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Tangents of the results."""
        return jvp(self, every, tangents)


LEADING_ARGUMENTS = 2
"""Number of arguments of a node's `forward` before the operator's own."""


class OperatorNode(torch.autograd.Function):
    """Base of the autograd nodes; each registration derives a class, whose name appears in the graph."""

    @staticmethod
    def forward(ctx: Any, primitive: Primitive, forward_mode: bool, *flat: Any) -> Flat:
        """Compute the results, and save the values that the backward needs."""
        plan = primitive.plan(primitive.flattening.needed(ctx.needs_input_grad[LEADING_ARGUMENTS:]))
        state = random_state(primitive, plan, flat)
        results = primitive.below(flat)
        prepare_backward(ctx, primitive, plan, flat, results, state)
        if forward_mode:
            names = all_names(primitive.specification)
            ctx.forward_kept = primitive.save(ctx.save_for_forward, names, flat, results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the flat arguments."""
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        # A function of `torch.func.vjp` runs after its level, to which saved tensors belong, has ended.
        saved = ctx.kept.load([capabilities.unwrap_dead(tensor) for tensor in ctx.saved_tensors])
        return (*(None,) * LEADING_ARGUMENTS, *ctx.vjp(saved, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """Tangents of the results, at the level of `torch.autograd.forward_ad`."""
        every = ctx.forward_kept.load(ctx.saved_tensors)
        primal = dict(zip(every, map_tensors(capabilities.primal_of, every.values()), strict=True))
        del ctx.forward_kept
        result_flattening = ctx.primitive.results
        results = result_flattening.flatten([primal[name] for name in result_flattening.spans])
        with capabilities.forward_mode_on():
            moved = ctx.primitive.jvp(primal, tangents[LEADING_ARGUMENTS:])
            answers = [_with_strides_of(*pair) for pair in zip(moved, results, strict=True)]
        return tuple(answers) if len(answers) > 1 else answers[0]


def _with_strides_of(tangent: Tensor | None, result: Tensor) -> Tensor | None:
    """Give a tangent the strides of its result, which torch requires."""
    if tangent is None or tangent.stride() == result.stride():
        return tangent
    # Allocated from the tangent, which may be batched where the result is not.
    return tangent.new_empty_strided(result.shape, result.stride()).copy_(tangent)


def random_state(primitive: Primitive, plan: BackwardPlan, flat: Sequence[Any]) -> RandomState | None:
    """The current random state, if the backward may have to rerun a reference that draws random numbers."""
    specification = primitive.specification
    if not (plan.derived or plan.follows_hidden) or not (specification.random or generators_in(flat)):
        return None
    if not capabilities.recording():
        return RandomState.now(flat)
    if plan.derived:
        raise specification.error(
            errors.TransformError,
            "it draws random numbers in a kernel, which a traced backward cannot draw again",
            hint="return what was drawn as a hidden result that is non-differentiable, "
            "and give formulas that use it",
        )
    return None  # only a second order needs it, and raises without it


def differentiate(primitive: Primitive, flat: Sequence[Any]) -> Flat:
    """Call outside of `torch.func`: with an autograd node where a gradient or tangent is needed."""
    forward_mode = capabilities.forward_mode_active()
    requires = any(isinstance(value, Tensor) and value.requires_grad for value in flat)
    if forward_mode or (requires and torch.is_grad_enabled()):
        return primitive.through(primitive.node, forward_mode, flat)
    return primitive.below(flat)


def prepare_backward(
    ctx: Any,
    primitive: Primitive,
    plan: BackwardPlan,
    flat: Sequence[Any],
    results: Sequence[Any],
    state: RandomState | None,
) -> None:
    """Save in a context the values that `OperatorNode.backward` needs."""
    ctx.mark_non_differentiable(*constant_results(primitive.results, primitive.specification, plan, results))
    ctx.set_materialize_grads(False)
    ctx.primitive = primitive
    ctx.vjp = primitive.vjp(
        plan, CallMetadata.of(flat, results, ctx.needs_input_grad[LEADING_ARGUMENTS:]), state
    )
    ctx.kept = primitive.save(ctx.save_for_backward, plan.saved, flat, results)


def all_names(specification: Specification) -> tuple[str, ...]:
    """Names of all arguments and results."""
    return (*specification.schema.names, *specification.schema.result_position)


@dataclass(frozen=True)
class RecordedOperator:
    """An operator's node.

    Args:
        specification: The operator, as it was when the node was made.
        saved: Names of the saved tensors, in order: inputs and results.
        inputs: Names of the inputs whose gradients it computes, in the order of its edges.
    """

    specification: Specification
    saved: tuple[str, ...]
    inputs: tuple[str, ...] = ()


def recorded_operator(node: Any) -> RecordedOperator | None:
    """The operator of an autograd node; None for a node of torch's, or of a Function that was not adopted.

    Example:
        >>> import torch, opsmith
        >>> found = recorded_operator(opsmith.ops.exp(torch.ones(2, requires_grad=True)).grad_fn)
        >>> found.specification.name, found.saved, found.inputs
        ('opsmith::exp', ('result',), ('x',))
    """
    written: Any = getattr(capabilities.forward_class(node), "recorded_operator", None)
    if isinstance(written, RecordedOperator):
        names = written.specification.schema.names
        return RecordedOperator(written.specification, written.saved, _needed_labels(node, names, 0))
    primitive = getattr(node, "primitive", None)
    specification = getattr(primitive, "specification", None)
    if primitive is None or not isinstance(specification, Specification):
        return None
    flattening = primitive.flattening
    leading = len(node.needs_input_grad) - len(flattening.labels)
    return RecordedOperator(
        specification, _saved_names(node), _needed_labels(node, flattening.labels, leading)
    )


def _needed_labels(node: Any, labels: Any, leading: int) -> tuple[str, ...]:
    needs = node.needs_input_grad[leading:]
    return tuple(label for label, needed in zip(labels, needs, strict=True) if needed)


def _saved_names(node: Any) -> tuple[str, ...]:
    """Names of the tensors that an `OperatorNode` saved; those of an adopted class have none."""
    items = getattr(getattr(node, "kept", None), "items", ())
    found: dict[int, str] = {}
    for name, is_list, indices in items:
        for position, index in enumerate(indices):
            if isinstance(index, int):
                found[index] = f"{name}[{position}]" if is_list else name
    return tuple(found[index] for index in sorted(found))
