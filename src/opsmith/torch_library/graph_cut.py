"""A formula that leaves torch loses the graph: found in a second order, before it is silently zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.calls import tensors_in
from opsmith.core.formula import Formula
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.pullback import pull_back


def refuse_graph_cut(
    specification: Specification,
    formula: Formula,
    label: str,
    gradient: Tensor,
    arguments: dict[str, Any],
    find: Callable[[Any], Any],
) -> None:
    """See that a gradient computed under `create_graph` hangs in the graph of what it was computed from.

    A gradient is linear in `grad`. So one that does not require a gradient itself, although `grad` does, was
    computed outside of torch. Where `grad` is a constant that shows nothing: then the formula runs once more
    with a `grad` that requires a gradient.

    Args:
        specification: The operator.
        formula: The formula.
        label: Name of the input, in messages.
        gradient: The gradient in question.
        arguments: What the formula was called with.
        find: Finds this gradient in what the formula returns.

    Raises:
        GraphCutError: Naming the input and the formula.
    """
    if gradient.requires_grad:
        return
    incoming = {
        keyword: arguments[keyword]
        for keyword, name in zip(formula.keywords, formula.parameters, strict=True)
        if name in specification.schema.gradient_position and isinstance(arguments[keyword], Tensor)
    }
    given = tensors_in(list(incoming.values()))
    if any(map(capabilities.is_gradient_batch, given)):
        return  # it shows no graph, and what leaves torch raises with it
    if not given or not any(tensor.requires_grad for tensor in tensors_in(list(arguments.values()))):
        return
    constant = not any(tensor.requires_grad for tensor in given)
    if constant and _depends(formula, incoming, arguments, find):
        return
    raise errors.GraphCutError(
        f"the gradient of `{label}` does not depend on `{next(iter(incoming))}` as far as torch can see",
        operator=specification.name,
        argument=label,
        where=formula.where,
        hint="write the formula with torch operations or opsmith operators, so that a second order exists; "
        "where the gradient is zero, give `opsmith.zero`",
    )


def _depends(
    formula: Formula, incoming: dict[str, Any], arguments: dict[str, Any], find: Callable[[Any], Any]
) -> bool:
    """Whether torch sees a formula's answer depend on the incoming gradients."""
    seen: list[bool] = []

    def again(*grads: Tensor) -> tuple[Tensor, ...]:
        rest = iter(grads)
        given = {
            name: [next(rest) for _ in value]
            if isinstance(value, list)
            else None
            if value is None
            else next(rest)
            for name, value in incoming.items()
        }
        answer = find(formula.function(**{**arguments, **given}))
        seen.append(isinstance(answer, Tensor) and answer.requires_grad)
        return tuple(tensors_in([answer]))

    pull_back(again, tensors_in(list(incoming.values())))
    return seen[0]
