"""Types and results of an adopted Function class that a call shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import cache
from typing import Any

import torch

from opsmith.adopting.class_specification import flat_reference
from opsmith.adopting.outputs import learned_outputs
from opsmith.adopting.signature import (
    arguments_of,
    forward_signature,
    without_defaults,
)
from opsmith.core.argument_types import VALUE_TYPES
from opsmith.core.origins.function_class import (
    AdoptedFunction,
    ObservedFacts,
    ObservedReturn,
)
from opsmith.core.results import Result
from opsmith.core.schema import Schema
from opsmith.core.tensors import sequence_like
from opsmith.torch_library import capabilities


def learned_from(
    adopted: AdoptedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    observed: ObservedReturn | None = None,
) -> AdoptedFunction | None:
    """Return the class, with the new types and results that a call shows; None if it shows nothing new.

    The author's `signature=` is never changed.
    """
    origin, facts = adopted.provenance(), adopted.facts
    outputs, results = adopted.outputs, adopted.schema.results
    arguments, parameters, defaults = adopted.schema.arguments, adopted.parameters, adopted.defaults
    ran = origin.ran or facts.written is not None
    if observed is not None:
        certain = ran or origin.stated or adopted.mutates is not None
        learned = learned_outputs(
            outputs,
            results,
            observed.structure,
            adopted.schema.names,
            certain=certain,
            flagged=any(map(has_flag, tuple(facts.dirty_under))),  # other threads change it
        )
        if learned is None or (origin.stated and _optional_results(learned[1]) != _optional_results(results)):
            return None
        (outputs, results), ran = learned, True
    elif origin.stated:
        return None
    else:
        if not parameters.plain and parameters.are_packed(args, kwargs):
            args, kwargs = tuple(parameters.spread(adopted.schema.call_values(args, kwargs))), {}
        try:
            bound = forward_signature(adopted.function_class).bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        origin = replace(origin, observed=(*origin.observed, tuple(map(placeholder, bound.args))))
        found, parameters = arguments_of(adopted.function_class, None, origin.observed)
        arguments, defaults = without_defaults(found, parameters)
    schema = Schema(arguments, results, single=outputs == 0)
    if (schema, parameters, outputs) == (adopted.schema, adopted.parameters, adopted.outputs):
        return None
    reference, final = origin.reference, replace(origin, ran=ran)
    if reference is not None:
        reference = flat_reference(reference, schema, outputs, parameters, adopted.operator)
    return replace(
        adopted,
        schema=schema,
        outputs=outputs,
        parameters=parameters,
        reference=reference,
        defaults=defaults,
        facts=ObservedFacts(
            dirty_under=facts.dirty_under, keeps_under=facts.keeps_under, chosen=facts.chosen
        ),
        provenance=lambda: final,
    )


def has_flag(flags: tuple[Any, ...]) -> bool:
    """Return True if an argument is a flag: a bool, a string or None."""
    return any(value not in (..., torch.Tensor) for value in flags)


def _optional_results(results: Sequence[Result]) -> list[bool]:
    """Return for each result True if it may be None; of `signature=`, a call changes only what is written."""
    return sorted(each.optional for each in results)


_SOME_OBJECT = object()


@cache
def _some_tensor() -> torch.Tensor:
    return capabilities.plain_tensor()


def placeholder(value: Any) -> Any:
    """Return a value of the same type that keeps neither a tensor nor an object alive."""
    if isinstance(value, torch.Tensor):
        return _some_tensor()
    if type(value) in (list, tuple) or hasattr(value, "_fields"):
        return sequence_like(value, map(placeholder, value))
    if type(value) is dict:
        return {key: placeholder(item) for key, item in value.items()}
    return value if value is None or isinstance(value, _KEPT) else _SOME_OBJECT


_KEPT = (*(kind for kind in VALUE_TYPES if kind is not torch.Tensor), torch.Size, Enum)
