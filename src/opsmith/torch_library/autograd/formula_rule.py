"""Gradients and tangents by formulas, zeros and derivation: the rule of operators other than classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.gradient_values import CallMetadata, constant_results
from opsmith.torch_library.autograd.node import NodeContext, needs_of
from opsmith.torch_library.autograd.primitive import Primitive, VjpFunction
from opsmith.torch_library.autograd.random_state import RandomState, generators_in
from opsmith.torch_library.autograd.saved_values import SavedValues
from opsmith.torch_library.flattening import Flat


@dataclass(eq=False)
class Kept:
    """Values other than tensors that a call keeps.

    Args:
        vjp: Its vector-Jacobian product.
        saved: Form of the saved tensors.
        every: Form of the tensors for tangents; None if none are needed.
    """

    vjp: VjpFunction
    saved: SavedValues
    every: SavedValues | None = None


class FormulaRule:
    """The rule of a primitive.

    Args:
        primitive: The operation.
        compute: Computes flat results of flat arguments; by default the primitive does, below autograd.
        forward_mode: True if tangents may be needed, too.
        written: Positions of the flat arguments that are written into.
        draws: True if the backward may draw the random numbers of the forward again.

    Attributes:
        before: Copies of the values that a formula needs and the call overwrites, by flat position.
    """

    def __init__(
        self,
        primitive: Primitive,
        compute: Callable[[Flat], Flat] | None = None,
        *,
        forward_mode: bool = False,
        written: Sequence[int] = (),
        draws: bool = True,
    ) -> None:
        self.primitive, self.specification = primitive, primitive.specification
        self.compute = compute or primitive.below
        self._forward_mode, self.written, self._draws = forward_mode, written, draws
        self.before: dict[int, Tensor] = {}
        self._plans: dict[tuple[bool, ...], BackwardPlan] = {}

    def keep_before(self, flat: Flat) -> None:
        """Copy values that the call overwrites; second-order gradients go through the copies."""
        needs = tuple(isinstance(value, Tensor) and value.requires_grad for value in flat)
        names, saved = self.primitive.flattening.names, self.plan(needs).saved
        self.before = {at: flat[at].clone() for at in self.written if names[at] in saved}

    def forward(self, ctx: NodeContext, flat: Flat) -> Flat:
        """Compute the results, and save the values that the backward needs."""
        state = self._random_state(self.plan(needs_of(ctx)), flat) if self._draws else None
        results = self.compute(flat)
        self.keep(ctx, flat, results, state)
        return results

    def keep(self, ctx: NodeContext, flat: Flat, results: Flat, state: RandomState | None = None) -> None:
        """Save the values that the backward needs.

        Args:
            ctx: The context of the node.
            flat: The arguments.
            results: The results.
            state: The random state of the forward, if the backward may draw the numbers again.
        """
        primitive, needs = self.primitive, needs_of(ctx)
        plan = self.plan(needs)
        ctx.non_differentiable = tuple(constant_results(primitive.results, self.specification, plan, results))
        ctx.materialize_grads = False
        flat = self.over_written(ctx, flat)
        vjp = primitive.vjp(plan, CallMetadata.of(flat, results, needs), state)
        ctx.to_save, saved = primitive.save(self.saved(plan), flat, results)
        ctx.kept = Kept(vjp, saved, self.save_every(ctx, flat, results))

    def over_written(self, ctx: NodeContext, flat: Flat) -> Flat:
        """Mark the written arguments; return all arguments, with copies of overwritten values."""
        if not self.written:
            return flat
        ctx.dirty_tensors = tuple(flat[at] for at in self.written)
        before, self.before = self.before, {}  # the node keeps the rule
        return tuple(before.get(at, value) for at, value in enumerate(flat))

    def save_every(self, ctx: NodeContext, flat: Flat, results: Flat) -> SavedValues | None:
        """Save all arguments and results for tangents, if tangents may be needed."""
        if not self._forward_mode:
            return None
        ctx.saved_for_forward, every = self.primitive.save(all_names(self.specification), flat, results)
        return every

    def backward(self, ctx: NodeContext, grads: Flat) -> Flat:
        """Gradients of the flat arguments."""
        if all(grad is None for grad in grads):
            return (None,) * len(self.primitive.flattening.labels)
        return tuple(ctx.kept.vjp(self.loaded(ctx), grads))

    def loaded(self, ctx: NodeContext) -> dict[str, Any]:
        """The saved values by name."""
        saved: SavedValues = ctx.kept.saved
        # A node without saved tensors may run its backward twice.
        tensors = ctx.saved_tensors if saved.labels else ()
        # A function of `torch.func.vjp` runs after its level, to which saved tensors belong, has ended.
        return saved.load([capabilities.unwrap_dead(tensor) for tensor in tensors])

    def tangents(self, ctx: NodeContext, tangents: Flat) -> Flat:
        """Tangents of the results, at the level of `torch.autograd.forward_ad`."""
        # From the node, where saved tensors keep their tangents: forward mode over a backward needs them.
        every = ctx.kept.every.load(ctx.saved_tensors)
        ctx.kept.every = None
        primal = dict(zip(every, map_tensors(capabilities.primal_of, every.values()), strict=True))
        result_flattening = self.primitive.results
        results = result_flattening.flatten([primal[name] for name in result_flattening.spans])
        with capabilities.forward_mode_on():
            moved = self.primitive.jvp(primal, tangents)
            return tuple(_with_strides_of(*pair) for pair in zip(moved, results, strict=True))

    def saved_labels(self, ctx: NodeContext) -> tuple[str, ...]:
        """Labels of the saved tensors."""
        return ctx.kept.saved.labels if isinstance(ctx.kept, Kept) else ()

    def plan(self, needs: tuple[bool, ...]) -> BackwardPlan:
        """The backward for the flat arguments whose gradients are needed."""
        plan = self._plans.get(needs)
        if plan is None:
            needed = self.primitive.flattening.needed(needs)
            plan = self._plans[needs] = self.primitive.plan(needed)
        return plan

    def saved(self, plan: BackwardPlan) -> Sequence[str]:
        """Names of the values to save."""
        return plan.saved

    def _random_state(self, plan: BackwardPlan, flat: Flat) -> RandomState | None:
        """The current random state, if the backward may have to rerun a reference that draws numbers."""
        specification = self.specification
        if not (plan.derived or plan.follows_hidden) or not (specification.random or generators_in(flat)):
            return None
        if not capabilities.recording():
            return RandomState.now(flat)
        if plan.derived:
            raise specification.error(
                errors.TransformError,
                "its kernel draws random numbers, and a traced backward cannot draw the same numbers again",
                hint="return the drawn numbers as a hidden result that is non-differentiable, "
                "and give formulas that use it",
            )
        return None  # only a second-order gradient needs it, and raises an error without it


def all_names(specification: Specification) -> tuple[str, ...]:
    """Names of all arguments and results."""
    return (*specification.schema.names, *specification.schema.result_position)


def _with_strides_of(tangent: Tensor | None, result: Tensor) -> Tensor | None:
    """Give a tangent the strides of its result, which torch requires."""
    if tangent is None or tangent.stride() == result.stride():
        return tangent
    # Allocated from the tangent, which may be batched although the result is not.
    return tangent.new_empty_strided(result.shape, result.stride()).copy_(tangent)


@dataclass(frozen=True)
class RecordedOperator:
    """The operator of an autograd node.

    Args:
        specification: The operator at the time when the node was made.
        saved: Names of the saved tensors, in order: inputs and results.
        inputs: Names of the inputs whose gradients it computes, in the order of its edges.
    """

    specification: Specification
    saved: tuple[str, ...]
    inputs: tuple[str, ...] = ()


def recorded_operator(node: Any) -> RecordedOperator | None:
    """The operator of an autograd node; None for torch's own node, or for a Function that was not adopted.

    Example:
        >>> import torch, opsmith
        >>> found = recorded_operator(opsmith.ops.exp(torch.ones(2, requires_grad=True)).grad_fn)
        >>> found.specification.name, found.saved, found.inputs
        ('opsmith::exp', ('result',), ('x',))
    """
    generated = getattr(capabilities.forward_class(node), "recorded_operator", None)
    rule = getattr(node, "rule", None)
    if isinstance(generated, RecordedOperator):
        specification, saved = generated.specification, generated.saved
        labels, needs = specification.schema.names, node.needs_input_grad
    elif isinstance(rule, FormulaRule):
        specification, saved = rule.specification, rule.saved_labels(node)
        labels, needs = rule.primitive.flattening.labels, needs_of(node)
    else:
        return None
    inputs = tuple(label for label, needed in zip(labels, needs, strict=True) if needed)
    return RecordedOperator(specification, saved, inputs)
