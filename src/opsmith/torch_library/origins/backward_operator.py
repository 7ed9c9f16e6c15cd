"""The backward of a Function class as an operator, for classes whose code runs only on real tensors.

`vmap` calls it for each example, and compiled code keeps it whole.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.core.argument_types import STR, TENSOR, ArgumentType
from opsmith.core.call_arguments import tensors_in
from opsmith.core.forked_locks import lock_of
from opsmith.core.formula import Formula, zero
from opsmith.core.gradients import NEEDED, GradientRules, TangentRules
from opsmith.core.origins.declared import Origin
from opsmith.core.origins.function_class import AdoptedFunction
from opsmith.core.results import Result
from opsmith.core.schema import REQUIRED, Argument, Schema
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.gradient_values import has_gradient
from opsmith.torch_library.origins.fallback import no_derivative_error
from opsmith.torch_library.origins.gradients import gradients_by_class

BACKWARD_SUFFIX = "_backward"
"""Suffix of the operator that computes the backward of a class."""

GRADIENTS = "gradients"
NEEDS = "inputs_needed"

_registered: dict[str, Any] = {}
"""Registration of the backward of each operator, by the operator's name."""
_registering = lock_of(sys.modules[__name__], "_registering")


def gradients_on_real_tensors(
    adopted: AdoptedFunction,
    values: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: frozenset[str],
    autocast: str | None,
) -> Mapping[str, Any]:
    """Gradients by input name, from an operator that runs the class's forward and backward.

    Args:
        adopted: The class.
        values: Values of the operator's arguments.
        grads: Gradient of each result, or None.
        needs: Names of the inputs whose gradient is needed.
        autocast: Autocast of the call.
    """
    names = [name for name in adopted.schema.names if name in needs]
    schema, overload = _backward_operator(adopted)
    given, named = schema.dispatched([*values, *grads, ",".join(names), autocast or ""])
    flat = iter(overload(*given, **named))
    found: dict[str, Any] = {}
    for name, value in zip(adopted.schema.names, values, strict=True):
        if name in needs:
            parts = [next(flat) if has_gradient(each.dtype) else zero for each in tensors_in([value])]
            found[name] = parts if isinstance(value, list | tuple) else parts[0] if parts else zero
    return found


def _backward_operator(adopted: AdoptedFunction) -> tuple[Schema, Any]:
    """The schema and overload of the operator of a class's backward, registered at its first use."""
    from opsmith.torch_library.registration import DispatcherRegistration  # which imports this module

    with _registering:
        known = _registered.get(adopted.operator)
        if known is None:
            known = DispatcherRegistration(_specification(adopted, _free_name(adopted.operator)))
            _registered[adopted.operator] = known
        elif known.specification.origin.subject is not adopted:
            known.update(_specification(adopted, known.specification.name))
        return known.specification.schema, known.overload


def _free_name(operator: str) -> str:
    """A free name for the backward of an operator: the author may already use the plain name."""
    name = operator + BACKWARD_SUFFIX
    while capabilities.operator_exists(name):
        name += "_"
    return name


@dataclass(frozen=True)
class BackwardOfClass(Origin):
    """Origin of the operator that computes the backward of an adopted class.

    Args:
        subject: The adopted class.
    """

    subject: AdoptedFunction

    casts = False


def _specification(adopted: AdoptedFunction, name: str) -> Specification:
    arguments = [Argument(each.name, each.kind, REQUIRED) for each in adopted.schema.arguments]
    optional = ArgumentType(TENSOR, optional=True)
    arguments += [Argument(f"grad_of_{each.name}", optional) for each in adopted.schema.results]
    arguments += [Argument(NEEDS, ArgumentType(STR)), Argument("forward_autocast", ArgumentType(STR))]
    schema = Schema(tuple(arguments), (Result(GRADIENTS, sequence=True),), single=True)
    count = len(adopted.schema.arguments)

    def needed(values: Sequence[Any]) -> list[tuple[str, Tensor]]:
        names = values[-2].split(",")
        pairs = zip(adopted.schema.names, values, strict=False)
        return [
            (name, tensor)
            for name, value in pairs
            if name in names
            for tensor in tensors_in([value])
            if has_gradient(tensor.dtype)
        ]

    def backward(*values: Any) -> list[Tensor]:
        *given, names, autocast = values
        needs = frozenset(names.split(","))
        with capabilities.above_autograd(), torch.no_grad():
            found = gradients_by_class(adopted, given[:count], given[count:], needs, autocast)
        flat = {name: iter(each if isinstance(each, list) else [each]) for name, each in found.items()}
        results = []
        for name in adopted.schema.names:
            for tensor in tensors_in([values[adopted.schema.names.index(name)]]) if name in needs else ():
                answer = next(flat[name])
                if has_gradient(tensor.dtype):
                    results.append(_like(tensor, answer))
        return results

    def fake(*values: Any) -> list[Tensor]:
        return [torch.empty_like(tensor) for _, tensor in needed(values)]

    backward.__module__ = __name__

    def refuse(**given: Any) -> Any:
        raise no_derivative_error(adopted)

    tensors = tuple(each.name for each in arguments if each.kind.is_tensor)
    gradients = Formula(refuse, tensors, (NEEDED,), (NEEDED,), joint=True)
    tangents = Formula(refuse, (GRADIENTS,), (NEEDS,), (NEEDS,), joint=True)
    return Specification(
        name=name,
        reference=backward,
        schema=schema,
        module=adopted.function_class.__module__,
        qualname=f"{adopted.name}.backward",
        where=adopted.backward_where,
        opaque=True,
        gradients=GradientRules(MappingProxyType(dict.fromkeys(tensors, gradients))),
        tangents=TangentRules(MappingProxyType({GRADIENTS: tangents})),
        fake=fake,
        origin=BackwardOfClass(adopted),
    )


def _like(tensor: Tensor, answer: Any) -> Tensor:
    """A gradient in the shape, dtype and layout of its input, which the fake kernel promises."""
    like = torch.empty_like(tensor)
    if not isinstance(answer, Tensor):
        return like.zero_()
    reduced = answer if answer.shape == tensor.shape else answer.sum_to_size(tensor.shape)
    if reduced.is_complex() and not tensor.is_complex():
        reduced = reduced.real
    return like.copy_(reduced)
