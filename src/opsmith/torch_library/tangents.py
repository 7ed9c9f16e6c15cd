"""Forward mode by the author's tangent formulas; results that have none are derived from the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.answers import NotImplementedGradient, Zero
from opsmith.core.calls import tensors_in
from opsmith.core.formula import Formula
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.forward_mode import jvp_from_vjp
from opsmith.torch_library.gradient_values import Form, fit_tangent
from opsmith.torch_library.targets import Target, has_gradient, mixes_dtypes


def jvp(
    target: Target, every: Mapping[str, Any], tangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Tangents of the flat results: by formula where one is given, else from the vector-Jacobian product.

    Args:
        target: The operator.
        every: All arguments and results by name, without tangents.
        tangents: Tangent of each flat argument, or None.

    Raises:
        GradientNotImplementedError: For a result whose tangent is declared as not implemented.
    """
    specification = target.specification
    rules = specification.tangents.rules
    tangents = _of_differentiable(specification, target.flattening, tangents)
    if all(tangent is None for tangent in tangents):
        return (None,) * len(target.results.described)
    moving = {
        result.name
        for result in specification.schema.results
        if result.differentiable
        and any(has_gradient(tensor.dtype) for tensor in tensors_in([every[result.name]]))
    }
    found: dict[str, Any] = {}
    answered: dict[int, Mapping[str, Any]] = {}
    arguments = _Arguments(target.flattening, every, tangents)
    for name in [
        result.name for result in specification.schema.results if result.name in moving & set(rules)
    ]:
        rule = rules[name]
        if isinstance(rule, NotImplementedGradient):
            raise _not_implemented(specification, name, rule)
        if isinstance(rule, Formula):
            if id(rule) not in answered:
                answered[id(rule)] = _answers(specification, rule, arguments)
            found[name] = _all_fitted(specification, rule, name, answered[id(rule)][name], arguments)
        elif isinstance(every[name], list):
            found[name] = [Form.of(tensor).zeros() for tensor in every[name]]
        else:
            found[name] = Form.of(every[name]).zeros()
    derived = moving - set(rules)
    if derived:
        spans = [target.results.spans[name] for name in derived]
        places = sorted(place for span in spans for place in range(span.start, span.stop))
        answers = jvp_from_vjp(target, every, tangents, places)
        found.update({name: target.results.item(name, answers) for name in derived})
    flat: list[Tensor | None] = []
    for name, span in target.results.spans.items():
        count = span.stop - span.start
        flat += found.get(name, [None] * count) if target.results.is_list(name) else [found.get(name)]
    return tuple(flat)


def _of_differentiable(
    specification: Specification, flattening: Flattening, tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The tangents, none for an input that is declared a constant."""
    flows = [
        specification.gradients.differentiable(name)
        for name in specification.schema.names
        for _ in flattening.labels(name)
    ]
    return [tangent if flow else None for tangent, flow in zip(tangents, flows, strict=True)]


class _Arguments:
    """What formulas may ask for, by name."""

    def __init__(
        self, flattening: Flattening, every: Mapping[str, Any], tangents: Sequence[Tensor | None]
    ) -> None:
        self.flattening, self.every = flattening, every
        flat = flattening.flatten([every[name] for name in flattening.schema.names])
        self.mixed = mixes_dtypes(flat)
        self.moving = [tangent for tangent in tangents if tangent is not None]
        self._tangents = [
            torch.zeros_like(value) if tangent is None and isinstance(value, Tensor) else tangent
            for value, tangent in zip(flat, tangents, strict=True)
        ]

    def get(self, name: str) -> Any:
        """The value of an input, a result or a tangent; the tangent of an input that is None is None."""
        tensor = self.flattening.schema.tangents.get(name)
        return self.every[name] if tensor is None else self.flattening.item(tensor, self._tangents)


def _answers(specification: Specification, formula: Formula, given: _Arguments) -> Mapping[str, Any]:
    """Run a formula, see that it leaves what it was given as it was, and return its answers by result."""
    arguments = {
        keyword: given.get(name) for keyword, name in zip(formula.keywords, formula.parameters, strict=True)
    }
    tensors = [(name, tensor) for name, value in arguments.items() for tensor in tensors_in([value])]
    before = [capabilities.version(tensor) for _, tensor in tensors]
    try:
        answer = formula.function(**arguments)
    except Exception as error:
        if not isinstance(error, errors.OpsmithError):
            which = ", ".join(f"`{name}`" for name in formula.answers_for)
            error.add_note(f"raised in the tangent of {which} of {specification.name}, {formula.where}")
        raise
    for (name, tensor), count in zip(tensors, before, strict=True):
        if count is not None and capabilities.version(tensor) != count:
            raise errors.SavedTensorModifiedError(
                f"a tangent formula wrote into `{name}`",
                operator=specification.name,
                argument=name,
                where=formula.where,
                hint=f"work on a copy, `{name}.clone()`, or use an operation without a trailing `_`",
            )
    if not formula.joint:
        return {formula.answers_for[0]: answer}
    if not isinstance(answer, Mapping) or set(answer) != set(formula.answers_for):
        raise errors.GradientCountError(
            "the joint tangent does not answer for the results that it covers",
            operator=specification.name,
            expected=f"a dict with {', '.join(f'`{name}`' for name in formula.answers_for)}",
            got=", ".join(f"`{name}`" for name in answer)
            if isinstance(answer, Mapping)
            else type(answer).__name__,
            where=formula.where,
            hint="return a dict by result name; cover fewer results with `@op.tangents('y', ...)`",
        )
    return answer


def _all_fitted(
    specification: Specification, formula: Formula, name: str, answer: Any, given: _Arguments
) -> Any:
    """A formula's tangent of one result, or of each tensor of its list."""
    results = given.every[name]
    if not isinstance(results, list):
        return _fitted(specification, formula, name, results, answer, given)
    if not isinstance(answer, list | tuple) or len(answer) != len(results):
        raise errors.GradientCountError(
            f"the tangent of the list `{name}` has the wrong length",
            operator=specification.name,
            argument=name,
            expected=f"a list of {len(results)} tensors",
            got=f"a list of {len(answer)}" if isinstance(answer, list | tuple) else type(answer).__name__,
            where=formula.where,
            hint="return one tangent for each tensor of the list",
        )
    pairs = enumerate(zip(results, answer, strict=True))
    return [_fitted(specification, formula, f"{name}[{i}]", *pair, given) for i, pair in pairs]


def _fitted(
    specification: Specification, formula: Formula, name: str, result: Tensor, answer: Any, given: _Arguments
) -> Tensor:
    tangent = fit_tangent(
        answer,
        Form.of(result),
        label=name,
        operator=specification.name,
        formula=formula,
        mixed=given.mixed,
    )
    # A tangent is linear in those that come in: one that hangs in no graph although they do was cut off.
    cut = torch.is_grad_enabled() and not tangent.requires_grad
    if cut and not isinstance(answer, Zero) and given.moving and all(t.requires_grad for t in given.moving):
        raise errors.GraphCutError(
            f"the tangent of `{name}` does not depend on the tangents that come in as far as torch can see",
            operator=specification.name,
            argument=name,
            where=formula.where,
            hint="write the formula with torch operations or opsmith operators, so that a second order "
            "exists; where the tangent is zero, give `opsmith.zero`",
        )
    return tangent


def _not_implemented(
    specification: Specification, name: str, rule: NotImplementedGradient
) -> errors.GradientNotImplementedError:
    return errors.GradientNotImplementedError(
        f"the tangent of `{name}` is not implemented: {rule.reason}",
        operator=specification.name,
        argument=name,
        where=specification.where,
        hint=f"take the gradient in reverse mode, or give a formula: `.tangents({name}=...)`",
    )
