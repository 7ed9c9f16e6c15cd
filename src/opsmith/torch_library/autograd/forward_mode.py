"""Forward mode: the author's tangent formulas, and Jacobian-vector products from gradient formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula, NotImplementedGradient, Zero
from opsmith.core.specification import Specification
from opsmith.torch_library.autocast import without_casts
from opsmith.torch_library.autograd.gradient_values import (
    CallMetadata,
    TensorMetadata,
    constant_results,
    fit_tangent,
    has_gradient,
    mixes_dtypes,
)
from opsmith.torch_library.autograd.graph_cuts import refuse_differentiation
from opsmith.torch_library.autograd.pullback import pull_back
from opsmith.torch_library.autograd.vjp import call_formula, formula_answers, list_answers
from opsmith.torch_library.flattening import ArgumentFlattening

if TYPE_CHECKING:
    from opsmith.torch_library.autograd.primitive import Primitive


def jvp(
    primitive: Primitive, every: Mapping[str, Any], tangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Compute the tangents of the flat results: by formula if there is one, else from the VJP.

    Args:
        primitive: The operator.
        every: All arguments and results by name, without tangents.
        tangents: Tangent of each flat argument, or None.

    Raises:
        GradientNotImplementedError: For a result whose tangent is declared as not implemented.
    """
    specification = primitive.specification
    rules = specification.tangents.rules
    tangents = _of_differentiable(specification, primitive.flattening, tangents)
    if all(tangent is None for tangent in tangents):
        return (None,) * len(primitive.results.described)
    moving = {
        result.name
        for result in specification.schema.results
        if result.differentiable
        and any(has_gradient(tensor.dtype) for tensor in tensors_in([every[result.name]]))
    }
    found: dict[str, Any] = {}
    answered: dict[int, Mapping[str, Any]] = {}
    arguments = _TangentArguments(primitive.flattening, every, tangents)
    for name in [
        result.name for result in specification.schema.results if result.name in moving & set(rules)
    ]:
        rule = rules[name]
        if isinstance(rule, NotImplementedGradient):
            raise _not_implemented(specification, name, rule)
        if isinstance(rule, Formula):
            if id(rule) not in answered:
                answered[id(rule)] = _formula_tangents(specification, rule, arguments)
            found[name] = _fitted_tangents(specification, rule, name, answered[id(rule)][name], arguments)
        elif isinstance(every[name], list):
            found[name] = [TensorMetadata.of(tensor).zeros() for tensor in every[name]]
        else:
            found[name] = TensorMetadata.of(every[name]).zeros()
    derived = moving - set(rules)
    if derived:
        indices = sorted(primitive.results.positions(derived))
        answers = jvp_from_vjp(primitive, every, tangents, indices)
        found.update({name: primitive.results.item(name, answers) for name in derived})
    flat: list[Tensor | None] = []
    for name, span in primitive.results.spans.items():
        count = span.stop - span.start
        flat += found.get(name, [None] * count) if primitive.results.is_list(name) else [found.get(name)]
    return tuple(flat)


def _of_differentiable(
    specification: Specification, flattening: ArgumentFlattening, tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The tangents, without tangents of inputs declared non-differentiable."""
    flows = map(specification.gradients.differentiable, flattening.names)
    return [tangent if flow else None for tangent, flow in zip(tangents, flows, strict=True)]


class _TangentArguments:
    """Arguments of tangent formulas, by name."""

    def __init__(
        self, flattening: ArgumentFlattening, every: Mapping[str, Any], tangents: Sequence[Tensor | None]
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
        """The value of an input, a result or a tangent; if an input is None, its tangent is None, too."""
        tensor = self.flattening.schema.tangents.get(name)
        return self.every[name] if tensor is None else self.flattening.item(tensor, self._tangents)


def _formula_tangents(
    specification: Specification, formula: Formula, given: _TangentArguments
) -> Mapping[str, Any]:
    """Run a formula, and return its tangents by result name."""
    arguments = {
        keyword: given.get(name) for keyword, name in zip(formula.keywords, formula.parameters, strict=True)
    }
    answer = call_formula(specification, formula, arguments, "tangent")
    return formula_answers(specification, formula, answer, formula.answers_for, "tangent")


def _fitted_tangents(
    specification: Specification, formula: Formula, name: str, answer: Any, given: _TangentArguments
) -> Any:
    """A formula's tangent of one result, or of each tensor of its list."""
    results = given.every[name]
    if not isinstance(results, list):
        return _fitted_tangent(specification, formula, name, results, answer, given)
    answers = list_answers(specification, formula, name, answer, len(results), "tangent")
    pairs = enumerate(zip(results, answers, strict=True))
    return [_fitted_tangent(specification, formula, f"{name}[{i}]", *pair, given) for i, pair in pairs]


def _fitted_tangent(
    specification: Specification,
    formula: Formula,
    name: str,
    result: Tensor,
    answer: Any,
    given: _TangentArguments,
) -> Tensor:
    tangent = fit_tangent(
        answer,
        TensorMetadata.of(result),
        label=name,
        operator=specification.name,
        formula=formula,
        mixed=given.mixed,
    )
    # A tangent is linear in the input tangents: if they have a graph but it has none, the graph was cut.
    cut = torch.is_grad_enabled() and not tangent.requires_grad
    if cut and not isinstance(answer, Zero) and given.moving and all(t.requires_grad for t in given.moving):
        error = specification.error(
            errors.GraphCutError,
            f"torch cannot see that the tangent of `{name}` depends on the tangents of the inputs",
            argument=name,
            where=formula.where,
            hint="write the formula with torch operations or opsmith operators: then a second-order "
            "derivative exists; if the tangent is zero, give `opsmith.zero`",
        )
        tangent = refuse_differentiation([tangent], given.moving, error)[0]
    return tangent


def _not_implemented(
    specification: Specification, name: str, rule: NotImplementedGradient
) -> errors.GradientNotImplementedError:
    return specification.error(
        errors.GradientNotImplementedError,
        f"the tangent of `{name}` is not implemented: {rule.reason}",
        argument=name,
        hint=f"use reverse mode, or give a formula: `.tangents({name}=...)`",
    )


def jvp_from_vjp(
    primitive: Primitive, every: Mapping[str, Any], tangents: Sequence[Tensor | None], wanted: Sequence[int]
) -> tuple[Tensor | None, ...]:
    """Compute the tangents of the flat results by differentiating the VJP with respect to its vector.

    Args:
        primitive: The operator.
        every: All arguments and results by name, without tangents.
        tangents: Tangent of each flat argument, or None.
        wanted: Positions of the flat results whose tangents are needed.
    """
    schema = primitive.specification.schema
    flat = primitive.flattening.flatten([every[name] for name in schema.names])
    results = primitive.results.flatten([every[name] for name in schema.result_position])
    needs = [tangent is not None for tangent in tangents]
    plan = primitive.plan(primitive.flattening.needed(needs))
    vjp = primitive.vjp(plan, CallMetadata.of(flat, results, needs), None)
    constant = {
        id(result) for result in constant_results(primitive.results, primitive.specification, plan, results)
    }
    moving = [
        index for index in sorted(wanted) if results[index] is not None and id(results[index]) not in constant
    ]

    answered: list[int] = []

    def products(*vectors: Tensor) -> tuple[Tensor, ...]:
        grads: list[Tensor | None] = [None] * len(results)
        for index, vector in zip(moving, vectors, strict=True):
            grads[index] = vector
        found = {index: product for index, product in enumerate(vjp(every, grads)) if product is not None}
        answered[:] = found
        return tuple(found.values())

    if not moving or not any(needs):
        return (None,) * len(results)
    vectors = [torch.zeros_like(results[index]) for index in moving]
    _, pull = pull_back(products, vectors, tensors_in(list(every.values())))
    with without_casts(tangents):  # autocast would round values that the VJP computes in float32
        answers = pull([tangents[index] for index in answered])
    found = dict(zip(moving, answers, strict=True))
    return tuple(found.get(index) for index in range(len(results)))
