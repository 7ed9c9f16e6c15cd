"""The autograd node of an adopted Function class, and the fast path to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.adopted import AdoptedFunction, ClassFormula, class_of
from opsmith.core.formula import zero
from opsmith.core.gradients import AUTOCAST, NEEDED
from opsmith.core.tensors import map_tensors, replace_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.adopted.context import Context, SavedTensors
from opsmith.torch_library.adopted.fallback import (
    graph_cut_error,
    once_differentiable_error,
    overwritten_error,
    proxy_reason,
    rerun_differs_error,
    run_or_fall_back,
)
from opsmith.torch_library.adopted.forward import ForwardRun, run_traceable
from opsmith.torch_library.adopted.gradients import by_name, run_backward
from opsmith.torch_library.autocast import autocast_in_force
from opsmith.torch_library.autograd.gradient_values import CallMetadata, fit, has_gradient
from opsmith.torch_library.autograd.graph_cuts import refuse_differentiation
from opsmith.torch_library.autograd.node import (
    LEADING_ARGUMENTS,
    OperatorNode,
    OperatorPrimitive,
    Primitive,
    all_names,
)
from opsmith.torch_library.autograd.random_state import RandomState
from opsmith.torch_library.autograd.saved_values import SavedValues
from opsmith.torch_library.contract import refuse_nondeterminism


@dataclass(frozen=True)
class NodeState:
    """Values that one call keeps for its backward.

    Args:
        places: Indices of the inputs among the saved tensors.
        inputs: The inputs, if a second order or a fallback of the backward needs them.
        for_second: True if a second order needs the inputs, and does not run through the context.
        given: The arguments of the class's forward, each tensor replaced by a placeholder.
        metadata: Metadata of the call's tensors.
        random: The random state of the forward, if it may run again.
        constant: Positions of the results that have no gradient.
        autocast: Autocast of the call.
    """

    places: tuple[int, ...]
    inputs: SavedValues | None
    for_second: bool
    given: tuple[Any, ...]
    metadata: CallMetadata
    random: RandomState | None
    constant: frozenset[int]
    autocast: str | None


class AdoptedNode(OperatorNode):
    """One node for all adopted operators; each registration derives its own."""

    @staticmethod
    def forward(ctx: Any, primitive: Primitive, forward_mode: bool, *flat: Any) -> tuple[Tensor, ...]:
        """Run the class's forward and keep its context; fall back to `OperatorNode` where it cannot run."""
        adopted, values = class_of(primitive.specification.origin), primitive.flattening.pack(flat)
        ctx.state = None
        needs = primitive.flattening.needed(ctx.needs_input_grad[LEADING_ARGUMENTS:])
        run, state = None, None
        if adopted.random and not capabilities.recording():
            state = RandomState.now(flat)
        opaque_on_proxies = primitive.specification.opaque and proxy_reason(values) is not None
        if (
            isinstance(primitive, OperatorPrimitive)
            and uses_class_backward(primitive, needs)
            and not opaque_on_proxies
        ):
            refuse_nondeterminism(primitive.specification)
            own = partial(run_traceable, adopted, values, needs)
            run = run_or_fall_back(adopted, "forward", values, own, _no_run)
        if run is None:
            return OperatorNode.forward(ctx, primitive, forward_mode, *flat)
        save_run(ctx, primitive, flat, run, state)
        if forward_mode:
            names = all_names(primitive.specification)
            ctx.forward_kept = primitive.save(ctx.save_for_forward, names, flat, run.results)
        return run.results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the flat arguments."""
        if ctx.state is None:
            return OperatorNode.backward(ctx, *grads)
        return (*(None,) * LEADING_ARGUMENTS, *saved_gradients(ctx, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """Tangents of the results; None for those that the class marked as constants, as torch wants it."""
        answers = OperatorNode.jvp(ctx, *tangents)
        if ctx.state is None or not ctx.state.constant:
            return answers
        every = answers if isinstance(answers, tuple) else (answers,)
        kept = [None if at in ctx.state.constant else answer for at, answer in enumerate(every)]
        return tuple(kept) if len(kept) > 1 else kept[0]


def _no_run() -> ForwardRun | None:
    """The run of a forward that the operator itself computes, by a fallback of its own."""
    return None


def uses_class_backward(primitive: Primitive, needs: frozenset[str]) -> bool:
    """Return True if the class's backward computes all gradients, without formulas attached later."""
    rules = primitive.specification.gradients.rules
    return all(isinstance(rules.get(name), ClassFormula) for name in needs)


def save_run(
    ctx: Any,
    primitive: Primitive,
    flat: Sequence[Any],
    run: ForwardRun,
    state: RandomState | None,
    lost: bool = False,
    of_torch: bool = False,
) -> bool:
    """Save in a node's context what its backward needs; return True if a second order needs the inputs.

    Args:
        ctx: The context.
        primitive: The operator.
        flat: The arguments as they were before the call.
        run: The run of its forward.
        state: The random state of the forward, if it may run again.
        lost: True if the forward has written over an argument, of which there is no copy.
        of_torch: True if the class ran on this context itself, in a node of the flat arguments alone.
    """
    specification = primitive.specification
    adopted = class_of(specification.origin)
    constant = frozenset(
        position
        for position, (result, described) in enumerate(
            zip(run.results, specification.schema.results, strict=True)
        )
        if result is not None
        and (position in run.constant or not described.differentiable or not has_gradient(result.dtype))
    )
    ctx.mark_non_differentiable(*(run.results[position] for position in sorted(constant)))
    if not of_torch:
        ctx.set_materialize_grads(False)
    ctx.primitive = primitive
    saved = SavedTensors(each for each in run.context.opsmith_record.saved if isinstance(each, Tensor))
    ctx.packed = run.context.pack(saved)
    inputs = None
    for_second = _keeps_inputs(adopted, saved.tensors, run)
    places: list[int] = []
    if (for_second and not lost) or proxy_reason(flat) is not None:
        names = specification.schema.names
        inputs = primitive.save(lambda *kept: places.extend(map(saved.place, kept)), names, flat, run.results)
    ctx.save_for_backward(*saved.tensors)
    metadata = CallMetadata.of(
        flat, run.results, ctx.needs_input_grad[0 if of_torch else LEADING_ARGUMENTS :]
    )
    given = replace_tensors(tuple(run.given), repeat(PLACEHOLDER))
    ctx.state = NodeState(
        tuple(places), inputs, for_second, given, metadata, state, constant, autocast_in_force()
    )
    return for_second


PLACEHOLDER = capabilities.plain_tensor()
"""Tensor in place of those in arguments, of which only the type matters: a node keeps none alive."""


def _keeps_inputs(adopted: AdoptedFunction, kept: Sequence[Tensor], run: ForwardRun) -> bool:
    """Return True if a second order needs the inputs, since saved intermediate values have no graph.

    An integer or a mask is a constant of the derivative in any case.
    """
    on_the_way = run.keeps(kept, run.results)
    if adopted.reference is not None and not adopted.surrogate:
        return on_the_way or adopted.once_differentiable or adopted.leaves_torch
    return on_the_way and not adopted.once_differentiable


def saved_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the flat arguments, from what `save_run` saved."""
    saved = ctx.saved_tensors
    return class_gradients(ctx.primitive, ctx.state, ctx.packed.unpack(saved), saved, grads)


def class_gradients(
    primitive: Primitive,
    state: NodeState,
    context: Context,
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of the flat arguments by the class's backward, with all checks.

    Args:
        primitive: The operator.
        state: What the call kept.
        context: The class's context.
        saved: The saved tensors.
        grads: Gradient of each result, None where there is none.
    """
    specification = primitive.specification
    adopted = class_of(specification.origin)
    schema, flattening = specification.schema, primitive.flattening
    formula = next(rule for rule in specification.gradients.rules.values() if isinstance(rule, ClassFormula))
    higher = torch.is_grad_enabled()

    def run(grads: Sequence[Tensor | None]) -> list[Any]:
        return run_backward(adopted, context, grads, state.metadata.results, state.given)

    def own() -> list[Any]:
        answers = run(grads)
        answers = _checked_graph(adopted, run, answers, saved, grads) if higher else answers
        return _flat(primitive, by_name(adopted, answers, state.given, frozenset(schema.names)))

    recompute = partial(_recomputed, primitive, state, formula, saved)
    if higher and state.for_second and state.inputs is not None:
        answers = recompute(grads)
        if adopted.reference is None or adopted.surrogate:
            with torch.no_grad():
                first = _flat(primitive, by_name(adopted, run(grads), state.given, frozenset(schema.names)))
            answers = _if_reproducible(adopted, answers, first, [*saved, *grads])
            answers = _checked_graph(adopted, recompute, answers, saved, grads)
    elif higher and state.for_second:
        lost = torch.empty(0, requires_grad=True)  # stands for the history of the value before the call
        answers = refuse_differentiation(own(), [*saved, *grads, lost], overwritten_error(adopted))
    else:
        instead = None if state.inputs is None else partial(recompute, grads)
        answers = run_or_fall_back(adopted, "backward", [*saved, *grads], own, instead)
    return [
        None
        if expected is None or answer is None or answer is zero
        else fit(answer, expected, label=label, operator=specification.name, formula=formula, mixed=True)
        for answer, expected, label in zip(answers, state.metadata.inputs, flattening.labels, strict=True)
    ]


def _if_reproducible(
    adopted: AdoptedFunction, answers: Sequence[Any], first: Sequence[Any], around: Sequence[Tensor | None]
) -> list[Any]:
    """Recomputed gradients if they equal those of the first run; else these, which refuse a second order.

    A forward that draws random numbers, or keeps state, gives other results when it runs again.
    """
    held: list[Any] = []
    for again, once in zip(answers, first, strict=True):
        same = not isinstance(once, Tensor) or (
            isinstance(again, Tensor)
            and again.shape == once.shape
            and torch.allclose(again.detach(), once, rtol=torch.finfo(once.dtype).eps ** 0.5, equal_nan=True)
        )
        held.append(
            again if same else refuse_differentiation([once], around, rerun_differs_error(adopted))[0]
        )
    return held


def _recomputed(
    primitive: Primitive,
    state: NodeState,
    formula: ClassFormula,
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Any]:
    """Gradients of a backward that will be differentiated: recomputed from the inputs."""
    assert state.inputs is not None
    schema, flattening = primitive.specification.schema, primitive.flattening
    needed = flattening.needed([expected is not None for expected in state.metadata.inputs])
    given: dict[str, Any] = state.inputs.load([saved[at] for at in state.places])
    for name, position in schema.gradient_position.items():
        grad, expected = grads[position], state.metadata.results[position]
        given[name] = expected.zeros() if grad is None and expected is not None else grad
    with state.random.again() if state.random else nullcontext():
        found = formula.function(**given, **{NEEDED: needed, AUTOCAST: state.autocast})
    return _flat(primitive, found)


def _flat(primitive: Primitive, answers: Mapping[str, Any]) -> list[Any]:
    """The gradient of each flat argument, from those by name."""
    flat: list[Any] = []
    for name in primitive.specification.schema.names:
        count, answer = len(primitive.flattening.positions([name])), answers.get(name)
        flat.extend(answer if isinstance(answer, list | tuple) else [answer] * count)
    return flat


def _checked_graph(
    adopted: AdoptedFunction,
    run: Callable[[Sequence[Tensor | None]], list[Any]],
    answers: list[Any],
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Any]:
    """Gradients under `create_graph`: those that lost the graph raise when they are differentiated."""
    sources = [tensor for tensor in (*saved, *grads) if tensor is not None and tensor.requires_grad]
    # A class may give zeros on purpose.
    cut = [isinstance(each, Tensor) and not each.requires_grad and bool(each.any()) for each in answers]
    if not sources or not any(cut):
        return answers
    if adopted.once_differentiable:
        error: errors.OpsmithError = once_differentiable_error(adopted)
    else:
        if not any(grad is not None and grad.requires_grad for grad in grads):
            # A gradient is linear in `grad`: if it depends on it, it has a graph where `grad` has one.
            grads = map_tensors(lambda each: each.detach().requires_grad_(has_gradient(each.dtype)), grads)
            cut = [lost and not each.requires_grad for lost, each in zip(cut, run(grads), strict=True)]
        error = graph_cut_error(adopted)
    return [
        refuse_differentiation([answer], sources, error)[0] if lost else answer
        for answer, lost in zip(answers, cut, strict=True)
    ]
