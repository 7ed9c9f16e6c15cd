"""Specification of an adopted Function class: how it and its derivatives are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

from opsmith.adopting.class_samples import ClassSamples
from opsmith.core.call_arguments import CallArguments, check_attached
from opsmith.core.formula import non_differentiable, not_implemented
from opsmith.core.forward_arguments import ForwardArguments
from opsmith.core.functional_form import copied_back
from opsmith.core.gradients import GradientRules, Rule, TangentRule, TangentRules
from opsmith.core.origins.function_class import (
    AdoptedFunction,
    Outputs,
    leaves,
)
from opsmith.core.samples import (
    LocatedSamples,
    Make,
)
from opsmith.core.schema import Schema
from opsmith.core.specification import Specification
from opsmith.torch_library.origins.fallback import declare_opaque
from opsmith.torch_library.origins.gradients import gradient_formula, tangent_formula


def specification_of(
    adopted: AdoptedFunction, samples: ClassSamples | None, module: str, *, opaque: bool
) -> Specification:
    """Return the specification of an adopted class."""
    function_class = adopted.function_class
    if opaque:
        declare_opaque(adopted)
    return Specification(
        name=adopted.operator,
        **computed_by(adopted),
        module=module,
        qualname=function_class.__qualname__,
        where=adopted.where,
        opaque=opaque and adopted.reference is None,
        random=adopted.random,
        gradients=GradientRules(MappingProxyType(class_gradients(adopted)), surrogate=adopted.surrogate),
        tangents=TangentRules(MappingProxyType(class_tangents(adopted))),
        samples=None if samples is None else packed_samples(samples, adopted),
    )


def computed_by(adopted: AdoptedFunction) -> dict[str, Any]:
    """Return the parts of a specification that run a class, in place if it writes into arguments."""
    schema, reference = adopted.call_schema, adopted.reference
    if reference is None:
        reference = adopted.compute(None, in_place=bool(schema.written))
    elif schema.written:
        reference = copied_back(reference, schema)
    return {"schema": schema, "origin": adopted, "reference": reference}


def class_gradients(adopted: AdoptedFunction) -> dict[str, Rule]:
    """Return the gradient rule of each argument: the class's backward, or none for a constant."""
    rules: dict[str, Rule] = {}
    if adopted.backward is not None:
        rules = dict.fromkeys(adopted.differentiable, gradient_formula(adopted))
    constants = set(adopted.schema.tensor_names) - set(adopted.differentiable)
    return rules | dict.fromkeys(constants, non_differentiable)


def class_tangents(adopted: AdoptedFunction) -> dict[str, TangentRule]:
    """Return the tangent rule of each result of a class: its own jvp, or a rule derived from its backward."""
    results = [result.name for result in adopted.schema.results if result.differentiable]
    if adopted.random:
        why = "its forward draws random numbers, and forward mode would run it again with different numbers"
        return dict.fromkeys(results, not_implemented(why))
    formula = tangent_formula(adopted)
    if formula is not None:
        return dict.fromkeys(results, formula)
    if "nonlinear" in adopted.claims:
        why = "its backward is not linear in grad_output, so forward mode cannot be derived from it"
        return dict.fromkeys(results, not_implemented(why))
    return {}


def flat_reference(
    reference: Callable[..., Any],
    schema: Schema,
    outputs: Outputs,
    parameters: ForwardArguments,
    operator: str,
) -> Callable[..., Any]:
    """Return a reference that takes the operator's arguments and returns its results in a flat tuple."""
    flat = not isinstance(outputs, tuple) or outputs == tuple(range(len(outputs)))  # in the same order
    by_position = None if parameters.plain else parameters.names
    check_attached(reference, "the reference", schema, operator, by_position)
    if parameters.plain and flat:
        return reference

    @functools.wraps(reference)
    def flattened(*values: Any) -> Any:
        returned = reference(*parameters.spread(values))
        parts = leaves(outputs, returned)
        found = {position: value for position, value in parts if position is not None}
        return returned if flat else tuple(found[position] for position in range(len(found)))

    return flattened


def packed_samples(samples: ClassSamples, adopted: AdoptedFunction) -> LocatedSamples:
    """Return the samples as calls of the operator, whose arguments carry the arguments of forward."""

    def packed(make: Make) -> Iterable[Any]:
        return [CallArguments(*adopted.completed(tuple(values), {})) for values in samples.values(make)]

    return LocatedSamples(packed, samples.location)
