"""The backward and jvp of an adopted Function class, run directly and as formulas of an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import requires_gradient, shown
from opsmith.core.formula import zero
from opsmith.core.forward_arguments import take_apart
from opsmith.core.gradients import AUTOCAST, NEEDED
from opsmith.core.location import where
from opsmith.core.origins.declared import SECOND
from opsmith.core.origins.function_class import AdoptedFunction, ClassFormula, side_by_side
from opsmith.core.tensors import map_tensors
from opsmith.torch_library.autocast import autocast_in_force, autocasting
from opsmith.torch_library.autograd.gradient_values import TensorMetadata
from opsmith.torch_library.autograd.graph_cuts import refuse_differentiation
from opsmith.torch_library.autograd.pullback import vjp_by_recompute
from opsmith.torch_library.flattening import ArgumentFlattening
from opsmith.torch_library.origins.context import Context, SavedTensors
from opsmith.torch_library.origins.fallback import (
    cannot_run,
    once_differentiable_error,
    proxy_reason,
    random_rerun_error,
    run_or_fall_back,
)
from opsmith.torch_library.origins.forward import ForwardRun, run_forward, version_of
from opsmith.torch_library.symbolic_sizes import for_symbolic_sizes


def run_backward(
    adopted: AdoptedFunction,
    context: Context,
    grads: Sequence[Tensor | None],
    metadata: Sequence[TensorMetadata | None],
    given: Sequence[Any],
) -> list[Any]:
    """Run the backward of an adopted class.

    Args:
        adopted: The class.
        context: Context of its forward.
        grads: Gradient of each result, or None.
        metadata: Metadata of each result; None for a missing result.
        given: The arguments of its forward; only their types matter.

    Returns:
        The gradient of each argument of its forward; None if it returns None.

    Raises:
        GradientCountError: If the number of gradients differs from the number of arguments of forward.
        SavedTensorModifiedError: If it writes into a grad_output, unlike its first run.
    """
    facts = adopted.facts
    handed = _by_output(adopted, context, grads, metadata)
    if facts.grads_written is not False:
        handed = [grad.clone() if isinstance(grad, Tensor) else grad for grad in handed]
    before = [version_of(grad) for grad in handed]
    assert adopted.backward is not None
    backward = for_symbolic_sizes(adopted.backward, handed)
    # In grad mode `once_differentiable` raises from its own node, without the operator's name.
    with torch.set_grad_enabled(torch.is_grad_enabled() and not adopted.once_differentiable):
        answer = backward(context, *handed)
    after = [version_of(grad) for grad in handed]
    if before != after and facts.grads_written is False:
        raise grad_output_error(adopted)
    if facts.grads_written is None and not (set(after) <= {None}):
        facts.grads_written = before != after
    return by_position(adopted, context.needs_input_grad, answer, given)


def grad_output_error(adopted: AdoptedFunction) -> errors.OpsmithError:
    """The error for a backward that wrote into a grad_output; later runs get copies."""
    adopted.facts.grads_written = True
    return adopted.error(
        errors.SavedTensorModifiedError,
        f"`{adopted.name}.backward` wrote into a grad_output, but not in its first run",
        where=adopted.backward_where,
        hint="let backward work on a copy: `grad = grad.clone()`",
    )


def _by_output(
    adopted: AdoptedFunction,
    context: Context,
    grads: Sequence[Tensor | None],
    metadata: Sequence[TensorMetadata | None],
) -> list[Any]:
    """The output gradients as the class takes them: one for each output at the top level."""
    handed: list[Any] = []
    for output in side_by_side(adopted.outputs):
        if output is None:
            handed.append(None)
            continue
        grad, expected = grads[output], metadata[output]
        filled = grad is None and expected is not None and context.materialize_grads
        handed.append(expected.zeros() if filled and expected is not None else grad)
    return handed


def by_position(
    adopted: AdoptedFunction, needs: Sequence[bool], answer: Any, given: Sequence[Any]
) -> list[Any]:
    """One gradient for each argument of the forward; trailing Nones may be added or left out.

    Args:
        adopted: The class.
        needs: For each argument, True if its gradient is needed.
        answer: The return value of its backward.
        given: The arguments; only their types matter.

    Raises:
        GradientCountError: If this value does not fit the arguments.
    """
    answers = list(answer) if isinstance(answer, tuple | list) else [answer]
    names = adopted.argument_names(given)
    missing = [name for name, needed in list(zip(names, needs, strict=True))[len(answers) :] if needed]
    extra = [
        position for position, value in enumerate(answers) if position >= len(names) and value is not None
    ]
    if missing or extra:
        raise adopted.error(
            errors.GradientCountError,
            f"`{adopted.name}.backward` does not return one gradient for each argument of its forward",
            argument=missing[0] if missing else None,
            expected=f"{len(names)} gradients: {', '.join(f'`{name}`' for name in names)}",
            got=f"{len(answers)}",
            where=adopted.backward_where,
            hint="return one gradient for each argument of forward, in order, and None for an argument "
            "that is not a tensor",
        )
    answers = [*answers[: len(names)], *[None] * (len(names) - len(answers))]
    for name, value, found in zip(names, given, answers, strict=True):
        if found is not None and not isinstance(value, Tensor):
            raise adopted.error(
                errors.GradientCountError,
                f"`{adopted.name}.backward` returns a gradient for `{name}`, which is not a tensor",
                argument=name,
                expected="None",
                got=shown(found),
                where=adopted.backward_where,
                hint="check whether the gradients are in the order of the arguments of forward",
            )
    return answers


def gradient_formula(adopted: AdoptedFunction) -> ClassFormula:
    """The backward of an adopted class as a joint formula for all tensors among its arguments."""
    schema = adopted.schema
    differentiable = adopted.differentiable
    names = (*schema.names, *schema.gradient_position, NEEDED, AUTOCAST)

    def backward(**given: Any) -> Mapping[str, Any]:
        values = [given[name] for name in schema.names]
        grads = [given[name] for name in schema.gradient_position]
        if adopted.random and proxy_reason([*values, *grads]) is not None:
            raise random_rerun_error(adopted)
        needs, autocast = given[NEEDED], given[AUTOCAST]
        if adopted.has_stand_in("backward"):
            instead: Callable[[], Mapping[str, Any]] = partial(by_reference, adopted, values, grads, needs)
        else:
            instead = partial(_on_real_tensors, adopted, values, grads, needs, autocast)
        own = partial(gradients_by_class, adopted, values, grads, needs, autocast)
        return run_or_fall_back(adopted, "backward", [*values, *grads], own, instead)

    backward.__wrapped__ = adopted.backward  # type: ignore[attr-defined]  # where it was written
    return ClassFormula(backward, differentiable, names, names, joint=True)


def _on_real_tensors(
    adopted: AdoptedFunction,
    values: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: frozenset[str],
    autocast: str | None,
) -> Mapping[str, Any]:
    """Gradients that cannot be differentiated again, from the class's code on real tensors."""
    given = [*values, *grads]
    if proxy_reason(given) is not None:
        from opsmith.torch_library.origins.backward_operator import gradients_on_real_tensors

        return gradients_on_real_tensors(adopted, values, grads, needs, autocast)
    with torch.no_grad():
        found = gradients_by_class(adopted, values, grads, needs, autocast)
    facts, task = adopted.facts, f"backward {SECOND}"
    error = cannot_run(adopted, SECOND, facts.instead.get(task) or facts.suspected[task])
    refused = map_tensors(lambda each: refuse_differentiation([each], given, error)[0], found.values())
    return dict(zip(found, refused, strict=True))


def run_as_applied(
    adopted: AdoptedFunction, values: Sequence[Any], needs: frozenset[str], autocast: str | None
) -> ForwardRun:
    """Run the forward of a class again like `apply`: without grad mode, under the autocast of the call.

    The values that it keeps are in the graph: they are the given arguments and the operator's results. Grad
    mode is on if it keeps intermediate values.

    Args:
        adopted: The class.
        values: Values of the operator's arguments.
        needs: Names of the arguments whose gradient is needed.
        autocast: Autocast of the call.
    """
    with autocasting(autocast):
        if adopted.random:  # it would draw random numbers twice
            return run_forward(adopted, values, needs)
        with torch.no_grad():
            run = run_forward(adopted, values, needs)
        kept = SavedTensors(())
        run.context.each_tensor(lambda value: kept.place(value) if isinstance(value, Tensor) else value)
        if not (torch.is_grad_enabled() and run.keeps(kept.tensors, ())):
            return run
        if run.keeps(kept.tensors, run.results) or adopted.schema.new_values:
            return run_forward(adopted, values, needs)
        args, kwargs = adopted.schema.dispatched([*values])
        results = _operator(adopted)(*args, **kwargs)
        pairs = zip(run.results, results if isinstance(results, tuple) else (results,), strict=True)
        return replace(run, context=run.context.with_identities({id(old): new for old, new in pairs}))


def _operator(adopted: AdoptedFunction) -> Any:
    namespace, _, name = adopted.operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name)


def gradients_by_class(
    adopted: AdoptedFunction,
    values: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: frozenset[str],
    autocast: str | None,
) -> Mapping[str, Any]:
    """Gradients by input name, from a new run of the class's forward and its backward."""
    watched = torch.is_grad_enabled() and requires_gradient([*values, *grads])
    derived = watched and adopted.reference is not None and not adopted.surrogate
    if derived and adopted.once_differentiable:
        return by_reference(adopted, values, grads, needs)
    run = run_as_applied(adopted, values, needs, autocast)
    open_ = {position for position, result in enumerate(adopted.schema.results) if result.differentiable}
    if open_ <= run.constant:
        return dict.fromkeys(needs, zero)
    metadata = [None if result is None else TensorMetadata.of(result) for result in run.results]
    grads = [None if position in run.constant else grad for position, grad in enumerate(grads)]
    answers = run_backward(adopted, run.context, grads, metadata, run.given)
    lost = any(isinstance(answer, Tensor) and not answer.requires_grad for answer in answers)
    if derived and lost:
        return by_reference(adopted, values, grads, needs)
    if watched and adopted.once_differentiable:
        answers = refuse_differentiation(answers, [*values, *grads], once_differentiable_error(adopted))
    return by_name(adopted, answers, run.given, needs)


def by_name(
    adopted: AdoptedFunction, answers: Sequence[Any], given: Sequence[Any], needs: frozenset[str]
) -> Mapping[str, Any]:
    """Gradients by input name; None becomes zero.

    Args:
        adopted: The class.
        answers: A gradient for each argument of forward.
        given: The arguments of forward; only their types matter.
        needs: Names of the inputs whose gradient is needed.
    """
    filled = [zero if answer is None else answer for answer in answers]
    found: dict[str, Any] = {}
    for position, slot in enumerate(adopted.parameters.slots):
        if slot.name not in needs:
            continue
        if not slot.collects:
            found[slot.name] = filled[position]
        else:
            pairs = zip(filled[position:], given[position:], strict=True)
            found[slot.name] = [
                one
                for answer, value in pairs
                for one in ([answer] if slot.form == "rest" else _each(answer, value))
            ]
    return found


def _each(answer: Any, value: Any) -> list[Any]:
    """A gradient for each tensor in one of `*args`; tensors in a container have none."""
    if isinstance(value, Tensor):
        return [answer]
    inside: list[Tensor] = []
    take_apart(value, inside)
    return [zero] * len(inside)


def by_reference(
    adopted: AdoptedFunction, values: Sequence[Any], grads: Sequence[Tensor | None], needs: frozenset[str]
) -> Mapping[str, Any]:
    """Gradients derived from the reference."""
    reference = adopted.reference
    assert reference is not None
    flattening = ArgumentFlattening.of(adopted.schema, values)
    flat = flattening.flatten(values)
    argnums = [
        argnum
        for name in adopted.schema.names
        if name in needs
        for argnum in flattening.positions([name])
        if isinstance(flat[argnum], Tensor)
    ]
    answers = dict(
        zip(argnums, vjp_by_recompute(reference, flattening, flat, argnums, grads, None), strict=True)
    )
    every = [answers.get(argnum) for argnum in range(len(flat))]
    return {name: flattening.item(name, [zero if a is None else a for a in every]) for name in needs}


def tangent_formula(adopted: AdoptedFunction) -> ClassFormula | None:
    """The `jvp` of an adopted class as a joint formula for all its results; None if it has none."""
    jvp = adopted.method("jvp")
    if jvp is None:
        return None
    schema = adopted.schema
    tangents = {name: tangent for tangent, name in schema.tangents.items()}
    names = (*schema.names, *schema.tangents)
    results = [result for position, result in enumerate(schema.results) if result.differentiable]

    def forward_mode(**given: Any) -> Mapping[str, Any]:
        values = [given[name] for name in schema.names]
        run = run_as_applied(adopted, values, frozenset(schema.tensor_names), autocast_in_force())
        run.context.to_save = run.context.saved_for_forward
        skeletons = {slot.value for slot in adopted.parameters.slots if slot.form == "mixed"}
        # torch requires that the tangent of an input that forward writes into is written, too.
        written = {schema.names[position] for position in adopted.facts.written or ()}
        given = {
            name: value.clone()
            if schema.tangents.get(name) in written and isinstance(value, Tensor)
            else value
            for name, value in given.items()
        }
        moved = adopted.spread(
            [
                given[tangents[name]] if name in tangents else given[name] if name in skeletons else None
                for name in schema.names
            ]
        )
        answer = jvp(run.context, *moved)
        answers = answer if isinstance(answer, tuple | list) else (answer,)
        outputs = side_by_side(adopted.outputs)
        if len(answers) != len(outputs):
            raise adopted.error(
                errors.GradientCountError,
                f"`{adopted.name}.jvp` does not return one tangent for each result of its forward",
                expected=f"{len(outputs)} tangent{'s' * (len(outputs) != 1)}",
                got=f"{len(answers)}",
                where=where(jvp),
                hint="return one tangent for each result of forward, in order, or None instead of a tangent",
            )
        found = {
            schema.results[output].name: zero if one is None else one
            for output, one in zip(outputs, answers, strict=True)
            if output is not None
        }
        return {result.name: found.get(result.name, zero) for result in results}

    forward_mode.__wrapped__ = jvp  # type: ignore[attr-defined]  # where it was written
    return ClassFormula(forward_mode, tuple(result.name for result in results), names, names, joint=True)
