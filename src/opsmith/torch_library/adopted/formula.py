"""An adopted class as rules of an operator: a gradient formula that runs forward and backward of the class.

The formula runs the forward anew, so that what the forward keeps hangs in the graph of the inputs: a second
order is right also where a class saves what it computed on the way, which torch's own node takes for a
constant. Where the class's code cannot be run, under a transform or while tracing, its reference answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.core.adopted import Adopted, ClassFormula
from opsmith.core.answers import zero
from opsmith.core.calls import requires_gradient, tensors_in
from opsmith.core.formula import Formula
from opsmith.core.gradients import NEEDED
from opsmith.core.outputs import side_by_side
from opsmith.torch_library.adopted.backward import run_backward
from opsmith.torch_library.adopted.fallback import (
    attempt,
    refuse_second_draw,
    refuse_second_order,
    refusing,
    stand_ins,
)
from opsmith.torch_library.adopted.forward import run_forward
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.gradient_values import Form
from opsmith.torch_library.recompute import vjp_by_recompute


def gradient_formula(adopted: Adopted) -> ClassFormula:
    """The backward of an adopted class as a joint formula for all tensors among its arguments."""
    schema = adopted.schema
    differentiable = adopted.differentiable
    names = (*schema.names, *schema.gradient_position, NEEDED)

    def backward(**given: Any) -> Mapping[str, Any]:
        values = [given[name] for name in schema.names]
        grads = [given[name] for name in schema.gradient_position]
        if adopted.random and stand_ins([*values, *grads]) is not None:
            raise refuse_second_draw(adopted)
        return attempt(
            adopted,
            "backward",
            [*values, *grads],
            lambda: _by_class(adopted, values, grads, given[NEEDED]),
            lambda: by_reference(adopted, values, grads, given[NEEDED]),
        )

    backward.__wrapped__ = adopted.backward  # type: ignore[attr-defined]  # where it was written
    return ClassFormula(backward, differentiable, names, names, joint=True)


def _by_class(
    adopted: Adopted, values: Sequence[Any], grads: Sequence[Tensor | None], needs: frozenset[str]
) -> Mapping[str, Any]:
    watched = torch.is_grad_enabled() and requires_gradient([*values, *grads])
    derived = watched and adopted.reference is not None and not adopted.surrogate
    if derived and adopted.once_differentiable:
        return by_reference(adopted, values, grads, needs)
    run = run_forward(adopted, values, needs)
    open_ = {position for position, result in enumerate(adopted.schema.results) if result.differentiable}
    if open_ <= run.constant:
        return dict.fromkeys(needs, zero)
    forms = [None if result is None else Form.of(result) for result in run.results]
    grads = [None if position in run.constant else grad for position, grad in enumerate(grads)]
    answers = run_backward(adopted, run.context, grads, forms, run.given)
    lost = any(isinstance(answer, Tensor) and not answer.requires_grad for answer in answers)
    if derived and lost and requires_gradient(grads):
        return by_reference(adopted, values, grads, needs)
    if watched and adopted.once_differentiable:
        sources = [tensor for tensor in tensors_in([*values, *grads]) if tensor.requires_grad]
        answers = refusing(answers, sources, refuse_second_order(adopted))
    return by_name(adopted, answers, needs)


def by_name(adopted: Adopted, answers: Sequence[Any], needs: frozenset[str]) -> Mapping[str, Any]:
    """The answers of a backward by input, where None says zero."""
    filled = [zero if answer is None else answer for answer in answers]
    names = adopted.schema.names
    found: dict[str, Any] = dict(zip(names, filled, strict=False))
    if adopted.variadic:
        found[names[-1]] = filled[len(names) - 1 :]
    return {name: answer for name, answer in found.items() if name in needs}


def by_reference(
    adopted: Adopted, values: Sequence[Any], grads: Sequence[Tensor | None], needs: frozenset[str]
) -> Mapping[str, Any]:
    """The gradients that follow from the reference."""
    reference = adopted.reference
    assert reference is not None
    flattening = Flattening.of(adopted.schema, values)
    flat = flattening.flatten(values)
    places = [
        place
        for name in adopted.schema.names
        if name in needs
        for place in range(flattening.spans[name].start, flattening.spans[name].stop)
        if isinstance(flat[place], Tensor)
    ]
    answers = dict(
        zip(places, vjp_by_recompute(reference, flattening, flat, places, grads, None), strict=True)
    )
    every = [answers.get(place) for place in range(len(flat))]
    return {name: flattening.item(name, [zero if a is None else a for a in every]) for name in needs}


def tangent_formula(adopted: Adopted) -> Formula | None:
    """The `jvp` of an adopted class as a joint formula for all its results; None where it has none."""
    jvp = adopted.jvp
    if jvp is None:
        return None
    schema = adopted.schema
    tangents = {name: tangent for tangent, name in schema.tangents.items()}
    names = (*schema.names, *schema.tangents)
    results = [result for position, result in enumerate(schema.results) if result.differentiable]

    def forward_mode(**given: Any) -> Mapping[str, Any]:
        run = run_forward(adopted, [given[name] for name in schema.names], frozenset(schema.tensor_names))
        record = run.context.opsmith_record
        record.saved = record.saved_forward
        moved = adopted.spread([given[tangents[name]] if name in tangents else None for name in schema.names])
        answer = jvp(run.context, *moved)
        answers = answer if isinstance(answer, tuple | list) else (answer,)
        found = {
            schema.results[output].name: zero if one is None else one
            for output, one in zip(side_by_side(adopted.outputs), answers, strict=True)
            if output is not None
        }
        return {result.name: found.get(result.name, zero) for result in results}

    forward_mode.__wrapped__ = jvp  # type: ignore[attr-defined]  # where it was written
    return Formula(forward_mode, tuple(result.name for result in results), names, names, joint=True)
