"""The backward of a Function class: run with what its forward kept, its answers put in order by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.adopted import Adopted
from opsmith.core.calls import shown
from opsmith.core.outputs import side_by_side
from opsmith.torch_library.adopted.context import Context
from opsmith.torch_library.adopted.forward import version_of
from opsmith.torch_library.gradient_values import Form


def run_backward(
    adopted: Adopted,
    context: Context,
    grads: Sequence[Tensor | None],
    forms: Sequence[Form | None],
    given: Sequence[Any],
) -> list[Any]:
    """Run the backward of an adopted class.

    Args:
        adopted: The class.
        context: What its forward kept.
        grads: Gradient of each result, None where there is none.
        forms: Form of each result, None where there was none.
        given: The arguments of its forward; only what kind they are counts.

    Returns:
        For each argument of its forward the gradient, or None where it gives none.

    Raises:
        GradientCountError: If it answers for other arguments than there are.
        SavedTensorModifiedError: If it writes into a gradient that came in, and its first run did not.
    """
    facts = adopted.facts
    handed = _by_output(adopted, context, grads, forms)
    if facts.grads_written is not False:
        handed = [grad.clone() if isinstance(grad, Tensor) else grad for grad in handed]
    before = [version_of(grad) for grad in handed]
    assert adopted.backward is not None
    # The mark refuses by a node of its own, which names no operator, where grad mode is on.
    with torch.set_grad_enabled(torch.is_grad_enabled() and not adopted.once_differentiable):
        answer = adopted.backward(context, *handed)
    after = [version_of(grad) for grad in handed]
    if before != after and facts.grads_written is False:
        facts.grads_written = True
        raise errors.SavedTensorModifiedError(
            f"`{adopted.name}.backward` wrote into an incoming gradient, as its first run did not",
            operator=adopted.operator,
            where=adopted.backward_where,
            hint="let it work on a copy: `grad = grad.clone()`",
        )
    if facts.grads_written is None and not (set(after) <= {None}):
        facts.grads_written = before != after
    return _by_argument(adopted, context, answer, given)


def _by_output(
    adopted: Adopted, context: Context, grads: Sequence[Tensor | None], forms: Sequence[Form | None]
) -> list[Any]:
    """The incoming gradients as the class takes them: one for each output that it returned side by side."""
    handed: list[Any] = []
    for output in side_by_side(adopted.outputs):
        if output is None:
            handed.append(None)
            continue
        grad, form = grads[output], forms[output]
        filled = grad is None and form is not None and context.opsmith_record.materialize
        handed.append(form.zeros() if filled and form is not None else grad)
    return handed


def _by_argument(adopted: Adopted, context: Context, answer: Any, given: Sequence[Any]) -> list[Any]:
    """One answer for each argument of the forward: more may follow if they are None, and fewer be given."""
    answers = list(answer) if isinstance(answer, tuple | list) else [answer]
    names = adopted.argument_names(given)
    missing = [
        name
        for name, needed in list(zip(names, context.needs_input_grad, strict=True))[len(answers) :]
        if needed
    ]
    extra = [
        position for position, value in enumerate(answers) if position >= len(names) and value is not None
    ]
    if missing or extra:
        raise errors.GradientCountError(
            f"`{adopted.name}.backward` does not answer for the arguments of its forward",
            operator=adopted.operator,
            argument=missing[0] if missing else None,
            expected=f"{len(names)} gradients: {', '.join(f'`{name}`' for name in names)}",
            got=f"{len(answers)}",
            where=adopted.backward_where,
            hint="return one gradient for each argument of forward, in order, and None for what is no tensor",
        )
    answers = [*answers[: len(names)], *[None] * (len(names) - len(answers))]
    for name, value, found in zip(names, given, answers, strict=True):
        if found is not None and not isinstance(value, Tensor):
            raise errors.GradientCountError(
                f"`{adopted.name}.backward` gives a gradient for `{name}`, which is no tensor",
                operator=adopted.operator,
                argument=name,
                expected="None",
                got=shown(found),
                where=adopted.backward_where,
                hint="look whether its answers are in the order of the arguments of forward",
            )
    return answers
