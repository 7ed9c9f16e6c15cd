"""The autograd node of an operator: it saves what the needed formulas name, and runs them when asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.random_state import RandomState, generators_in
from opsmith.torch_library.result_flattening import Flat, ResultFlattening
from opsmith.torch_library.saving import keep
from opsmith.torch_library.targets import Forms, Target, has_gradient

LEADING = 2
"""How many arguments of a node's `forward` come before the operator's own."""


class OperatorNode(torch.autograd.Function):
    """One node for all operators; each registration derives its own, so that its name stands in the graph."""

    @staticmethod
    def forward(ctx: Any, target: Target, forward_mode: bool, *flat: Any) -> Flat:
        """Compute the results and keep what the backward will need."""
        plan = target.plan(target.flattening.needed(ctx.needs_input_grad[LEADING:]))
        state = _random_state(target, plan, flat)
        results = target.below(flat)
        prepare_backward(ctx, target, plan, flat, results, state)
        if forward_mode:
            names = every_name(target.specification)
            ctx.forward_kept = keep(
                ctx.save_for_forward, names, target.flattening, flat, results, target.results
            )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the flat arguments."""
        return run_backward(ctx, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """Tangents of the results, at the level of `torch.autograd.forward_ad`."""
        every = ctx.forward_kept.load(ctx.saved_tensors)
        primal = {name: without_tangent(value) for name, value in every.items()}
        del ctx.forward_kept
        lying = ctx.target.results
        results = lying.flatten([primal[name] for name in lying.spans])
        with capabilities.forward_mode_on():
            moved = ctx.target.jvp(primal, tangents[LEADING:])
            answers = [_laid_out(*pair) for pair in zip(moved, results, strict=True)]
        return tuple(answers) if len(answers) > 1 else answers[0]


def _laid_out(tangent: Tensor | None, result: Tensor) -> Tensor | None:
    """A tangent with the strides of its result, without which torch does not take it."""
    if tangent is None or tangent.stride() == result.stride():
        return tangent
    # Made of the tangent, which may be batched where the result is not.
    return tangent.new_empty_strided(result.shape, result.stride()).copy_(tangent)


def _random_state(target: Target, plan: BackwardPlan, flat: Sequence[Any]) -> RandomState | None:
    """The random state now, where the backward may have to run a reference that draws once more."""
    specification = target.specification
    if not (plan.derived or plan.follows_hidden) or not (specification.random or generators_in(flat)):
        return None
    if not capabilities.recording():
        return RandomState.now(flat)
    if plan.derived:
        raise errors.TransformError(
            "it draws random numbers in a kernel, which a traced backward cannot draw again",
            operator=specification.name,
            where=specification.where,
            hint="return what was drawn as a hidden result that is non-differentiable, "
            "and give formulas that use it",
        )
    return None  # only a second order would need it, and that says so


def differentiate(target: Target, flat: Sequence[Any]) -> Flat:
    """All results of a call outside of `torch.func`: with a node where autograd has anything to do."""
    forward_mode = capabilities.forward_mode_active()
    requires = any(isinstance(value, Tensor) and value.requires_grad for value in flat)
    if forward_mode or (requires and torch.is_grad_enabled()):
        results: Flat = target.node.apply(target, forward_mode, *flat)
        return results
    return target.below(flat)


def prepare_backward(
    ctx: Any,
    target: Target,
    plan: BackwardPlan,
    flat: Sequence[Any],
    results: Sequence[Any],
    state: RandomState | None,
) -> None:
    """Put into a context what `run_backward` will need."""
    ctx.mark_non_differentiable(*constant_results(target.results, target.specification, plan, results))
    ctx.set_materialize_grads(False)
    ctx.target = target
    ctx.vjp = target.vjp(plan, Forms.of(flat, results, ctx.needs_input_grad[LEADING:]), state)
    ctx.kept = keep(ctx.save_for_backward, plan.saved, target.flattening, flat, results, target.results)


def run_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Gradients of a node's arguments."""
    if all(grad is None for grad in grads):
        return (None,) * len(ctx.needs_input_grad)
    # What `torch.func.vjp` returns runs after its layer is gone, and saved tensors are of that layer.
    saved = ctx.kept.load([capabilities.unwrap_dead(tensor) for tensor in ctx.saved_tensors])
    return (*(None,) * LEADING, *ctx.vjp(saved, grads))


def every_name(specification: Specification) -> tuple[str, ...]:
    """Names of all arguments and results."""
    return (*specification.schema.names, *specification.schema.result_position)


def constant_results(
    flattening: ResultFlattening, specification: Specification, plan: BackwardPlan, results: Sequence[Any]
) -> list[Tensor]:
    """Results without a gradient: declared so, or of a dtype that has none.

    Raises:
        IntegerResultError: If a formula uses the gradient of a result that has none.
    """
    named = {name for formula in plan.formulas for name in formula.parameters}
    constant: list[Tensor] = []
    for described, result in zip(flattening.described, results, strict=True):
        if result is None or (described.differentiable and has_gradient(result.dtype)):
            continue
        constant.append(result)
        if described.differentiable and described.gradient_name() in named and specification.adopted is None:
            raise errors.IntegerResultError(
                f"an input requires a gradient, and `{described.name}` is {result.dtype}, which has none",
                operator=specification.name,
                argument=described.name,
                expected="a floating or complex result, since a formula uses its gradient",
                got=str(result.dtype),
                where=specification.where,
                hint=f"declare `results={{{described.name!r}: opsmith.non_differentiable}}`, "
                "or call it on floating tensors",
            )
    return constant


def without_tangent(value: Any) -> Any:
    """A saved value without its tangent at the level of `torch.autograd.forward_ad`."""
    if isinstance(value, Tensor):
        return capabilities.primal_of(value)
    if isinstance(value, list):
        return [without_tangent(item) for item in value]
    return value
