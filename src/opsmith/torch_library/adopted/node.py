"""The autograd node of an adopted operator: the class's forward and backward, its context between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.adopted import Adopted, ClassFormula
from opsmith.core.answers import zero
from opsmith.core.gradients import NEEDED
from opsmith.torch_library import capabilities
from opsmith.torch_library.adopted.backward import run_backward
from opsmith.torch_library.adopted.context import Packed
from opsmith.torch_library.adopted.fallback import (
    attempt,
    graph_cut,
    refuse_another_run,
    refuse_second_order,
    refusing,
    stand_ins,
)
from opsmith.torch_library.adopted.formula import by_name
from opsmith.torch_library.adopted.forward import Run, run_forward
from opsmith.torch_library.differentiation import (
    LEADING,
    OperatorNode,
    every_name,
)
from opsmith.torch_library.gradient_values import fit
from opsmith.torch_library.operator_call import OperatorCall
from opsmith.torch_library.random_state import RandomState
from opsmith.torch_library.saving import Kept, keep
from opsmith.torch_library.targets import Forms, Target, has_gradient


@dataclass(frozen=True)
class _State:
    """What one call keeps for its backward.

    Args:
        packed: The class's context, without its tensors.
        count: How many saved tensors are the context's.
        inputs: The inputs, where a second order will need them; None where it goes through the context.
        given: The arguments of the class's forward: for each whether it is a tensor.
        forms: Forms of the call's tensors.
        random: The random state of the forward, where it may have to run again.
    """

    packed: Packed
    count: int
    inputs: Kept | None
    given: tuple[Any, ...]
    forms: Forms
    random: RandomState | None


class AdoptedNode(OperatorNode):
    """One node for all adopted operators; each registration derives its own."""

    @staticmethod
    def forward(ctx: Any, target: Target, forward_mode: bool, *flat: Any) -> tuple[Tensor, ...]:
        """Run the class's forward and keep its context; where that cannot be, do as any operator does."""
        adopted, values = target.specification.adopted, target.flattening.pack(flat)
        assert adopted is not None
        ctx.state = None
        needs = target.flattening.needed(ctx.needs_input_grad[LEADING:])
        run, state = None, None
        if adopted.random and not capabilities.recording():
            state = RandomState.now(flat)
        whole = target.specification.opaque and stand_ins(values) is not None
        if isinstance(target, OperatorCall) and class_answers(target, needs) and not whole:
            own = partial(run_forward, adopted, values, needs)
            run = attempt(adopted, "forward", values, own, lambda: None)
        if run is None:
            return OperatorNode.forward(ctx, target, forward_mode, *flat)
        _keep(ctx, target, flat, run, state)
        if forward_mode:
            names = every_name(target.specification)
            ctx.forward_kept = keep(
                ctx.save_for_forward, names, target.flattening, flat, run.results, target.results
            )
        return run.results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the flat arguments."""
        if ctx.state is None:
            return OperatorNode.backward(ctx, *grads)
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return (*(None,) * LEADING, *_gradients(ctx.target, ctx.state, ctx.saved_tensors, grads))


def class_answers(target: Target, needs: frozenset[str]) -> bool:
    """Whether the class's backward is what answers, and no formula that was given for an input later."""
    rules = target.specification.gradients.rules
    return all(isinstance(rules.get(name), ClassFormula) for name in needs)


def _keep(ctx: Any, target: Target, flat: Sequence[Any], run: Run, state: RandomState | None) -> None:
    """Put into a node's context what its backward will need."""
    specification = target.specification
    adopted = specification.adopted
    assert adopted is not None
    constant = [
        result
        for position, (result, described) in enumerate(
            zip(run.results, specification.schema.results, strict=True)
        )
        if result is not None
        and (position in run.constant or not described.differentiable or not has_gradient(result.dtype))
    ]
    ctx.mark_non_differentiable(*constant)
    ctx.set_materialize_grads(False)
    ctx.target = target
    tensors, packed = run.context.pack()
    inputs = None
    if _keeps_inputs(adopted, tensors, run):
        extra: list[Tensor] = []
        inputs = keep(
            lambda *kept: extra.extend(kept),
            specification.schema.names,
            target.flattening,
            flat,
            run.results,
            target.results,
        )
    ctx.save_for_backward(*tensors, *(extra if inputs is not None else ()))
    forms = Forms.of(flat, run.results, ctx.needs_input_grad[LEADING:])
    given = tuple(value if not isinstance(value, Tensor) else _TENSOR for value in run.given)
    ctx.state = _State(packed, len(tensors), inputs, given, forms, state)


_TENSOR = torch.empty(0)
"""Stands for a tensor of which only that it is one is of interest."""


def _keeps_inputs(adopted: Adopted, kept: Sequence[Tensor], run: Run) -> bool:
    """Whether a second order needs the inputs: what was computed on the way hangs in no graph.

    An integer or a mask is a constant of the derivative in any case.
    """
    known = {id(value) for value in (*run.given, *run.results)}
    on_the_way = any(has_gradient(tensor.dtype) and id(tensor) not in known for tensor in kept)
    on_the_way = on_the_way or run.context.hides(run.given)
    if adopted.reference is not None and not adopted.surrogate:
        return on_the_way or adopted.once_differentiable or adopted.leaves_torch
    return on_the_way and not adopted.once_differentiable


def _gradients(
    target: Target, state: _State, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    specification = target.specification
    adopted = specification.adopted
    assert adopted is not None
    schema, flattening = specification.schema, target.flattening
    formula = next(rule for rule in specification.gradients.rules.values() if isinstance(rule, ClassFormula))
    higher = torch.is_grad_enabled()
    context = state.packed.unpack(saved[: state.count])

    def run(grads: Sequence[Tensor | None]) -> list[Any]:
        return run_backward(adopted, context, grads, state.forms.results, state.given)

    def own() -> list[Any]:
        answers = run(grads)
        answers = _held(adopted, run, answers, saved, grads) if higher else answers
        return _flat(target, by_name(adopted, answers, frozenset(schema.names)))

    anew = None if state.inputs is None else partial(_anew, target, state, formula, saved, grads)
    if higher and anew is not None:
        answers = anew()
        if adopted.reference is None or adopted.surrogate:
            with torch.no_grad():
                first = _flat(target, by_name(adopted, run(grads), frozenset(schema.names)))
            answers = _alike(adopted, answers, first, [*saved, *grads])
    else:
        answers = attempt(adopted, "backward", [*saved, *grads], own, anew)
    labels = [label for name in schema.names for label in flattening.labels(name)]
    return [
        None
        if form is None or answer is None or answer is zero
        else fit(answer, form, label=label, operator=specification.name, formula=formula, mixed=True)
        for answer, form, label in zip(answers, state.forms.inputs, labels, strict=True)
    ]


def _alike(
    adopted: Adopted, answers: Sequence[Any], first: Sequence[Any], around: Sequence[Tensor | None]
) -> list[Any]:
    """Answers that were computed anew, where they are those of the first run; else those, refusing more.

    A forward that draws, or that keeps a state of its own, computes something else when it runs again.
    """
    sources = [tensor for tensor in around if tensor is not None and tensor.requires_grad]
    held: list[Any] = []
    for again, once in zip(answers, first, strict=True):
        same = not isinstance(once, Tensor) or (
            isinstance(again, Tensor)
            and again.shape == once.shape
            and torch.allclose(again.detach(), once, rtol=torch.finfo(once.dtype).eps ** 0.5, equal_nan=True)
        )
        held.append(again if same else refusing([once], sources, refuse_another_run(adopted))[0])
    return held


def _anew(
    target: Target,
    state: _State,
    formula: ClassFormula,
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Any]:
    """The answers of a backward that is to be differentiated: everything is computed anew from the inputs."""
    assert state.inputs is not None
    schema, flattening = target.specification.schema, target.flattening
    needed = flattening.needed([form is not None for form in state.forms.inputs])
    given: dict[str, Any] = state.inputs.load(saved[state.count :])
    for name, position in schema.gradient_position.items():
        grad, form = grads[position], state.forms.results[position]
        given[name] = form.zeros() if grad is None and form is not None else grad
    with state.random.again() if state.random else nullcontext():
        found = formula.function(**given, **{NEEDED: needed})
    return _flat(target, found)


def _flat(target: Target, answers: Mapping[str, Any]) -> list[Any]:
    """The answer for each flat argument, from those by name."""
    flat: list[Any] = []
    for name in target.specification.schema.names:
        count, answer = len(target.flattening.labels(name)), answers.get(name)
        flat.extend(answer if isinstance(answer, list | tuple) else [answer] * count)
    return flat


def _held(
    adopted: Adopted,
    run: Callable[[Sequence[Tensor | None]], list[Any]],
    answers: list[Any],
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Any]:
    """Answers under `create_graph`: those that lost the graph say so when they are differentiated."""
    sources = [tensor for tensor in (*saved, *grads) if tensor is not None and tensor.requires_grad]
    cut = [isinstance(answer, Tensor) and not answer.requires_grad for answer in answers]
    if not sources or not any(cut):
        return answers
    if adopted.once_differentiable:
        error: errors.OpsmithError = refuse_second_order(adopted)
    else:
        if not any(grad is not None and grad.requires_grad for grad in grads):
            # Gradients are linear in what comes in: one that depends on it shows a graph to one that has one.
            leaves = [None if grad is None else grad.detach().requires_grad_() for grad in grads]
            again = run(leaves)
            cut = [isinstance(answer, Tensor) and not answer.requires_grad for answer in again]
        error = graph_cut(adopted)
    return [
        refusing([answer], sources, error)[0] if lost and bool(answer.any()) else answer
        for answer, lost in zip(answers, cut, strict=True)
    ]
