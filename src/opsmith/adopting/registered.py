"""Adopting an operator of torch.library: missing kernels and rules are added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.schema_matching import matched
from opsmith.core.functional_form import functional_name
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.samples import LocatedSamples, Make, Samples, read_samples
from opsmith.core.specification import Specification
from opsmith.declaration import declare_specified, declared_operators
from opsmith.torch_library import capabilities
from opsmith.torch_library.library_operators import (
    COMPOSITE,
    has_kernel,
    library_operator_of,
    register_adopted,
)
from opsmith.torch_library.registration import BITWISE, HIDDEN_SUFFIX

_TORCH_NAMESPACES = ("aten", "prim", "prims")


def is_operator(subject: Any) -> bool:
    """Return True for an operator of torch: an overload, a packet of them, or a `custom_op`."""
    return capabilities.overloads_of(subject) is not None


def is_custom_op(subject: Any) -> bool:
    """Return True for a `torch.library.custom_op`."""
    return type(subject).__name__ == "CustomOpDef"


def custom_function(subject: Any) -> Callable[..., Any] | None:
    """Return the function of a `torch.library.custom_op`; None if torch does not expose it.

    Raises:
        UnsupportedTorchError: If the capability `library_operators` is off.
    """
    parts = capabilities.custom_parts(_overload(capabilities.overloads_of(subject) or {}, subject))
    return None if parts is None else parts.function


def name_of(subject: Any) -> str:
    """Return the name of an operator of torch, `namespace::name`."""
    return _name(capabilities.overloads_of(subject) or {})


def adopt_registered(
    subject: Any,
    name: str | None,
    *,
    reference: Callable[..., Any] | None,
    samples: Samples | Iterable[Any] | None,
    module: str,
    accept: Mapping[tuple[str, ...], str] | None,
    **of_class: Any,
) -> Operator[..., Any]:
    """Add the missing kernels and rules to an operator of torch, and return its handle.

    Args:
        subject: One of its overloads, a packet with one overload, or a `torch.library.custom_op`.
        name: Must be None: the operator keeps its own name.
        reference: The mathematics in plain PyTorch; it needs no type hints.
        samples: Function that yields representative inputs, or a list of them.
        module: The module that adopts.
        accept: Findings of a check to accept.
        **of_class: Arguments that only a class takes; values other than the defaults are refused.
    """
    _refuse_options(subject, name=name, **of_class)
    overload = _overload(capabilities.overloads_of(subject) or {}, subject)
    signature = capabilities.signature_of(overload)
    if reference is None:
        raise errors.UsageError(
            "it must be adopted with a reference, from which the missing rules are derived",
            operator=signature.name,
            argument="reference",
            expected="a function that computes the same results in plain PyTorch",
            got="None",
            hint=f"write `opsmith.adopt(torch.ops.{signature.name.replace('::', '.')}, reference=f)`",
        )
    _refuse(overload, signature)
    specification = Specification(
        name=signature.name,
        reference=reference,
        schema=matched(signature, reference),
        module=module,
        qualname=reference.__qualname__,
        where=where(reference),
        random=torch.Tag.nondeterministic_seeded in overload.tags,
        deterministic=BITWISE not in overload.tags,
        inline=False,
        accept=dict(accept or {}),
    )
    specification = replace(specification, origin=library_operator_of(overload))
    _refuse_taken_form(specification)
    handle = declare_specified(specification, register=register_adopted)
    if samples is not None:
        handle.samples(samples if callable(samples) else _as_function(samples, signature.name))
    return handle


def _refuse_taken_form(specification: Specification) -> None:
    """Refuse an in-place operator if another operator has the name of its functional form."""
    name = functional_name(specification.name)
    if not specification.schema.written or not capabilities.operator_exists(name):
        return
    if specification.name not in {each.name for each in declared_operators()}:
        raise errors.NameTakenError(
            f"torch already has an operator `{name}`, the name of its functional form",
            operator=specification.name,
            where=specification.where,
            hint="rename that operator",
        )


def _as_function(samples: Iterable[Any], operator: str) -> LocatedSamples:
    """Return a list of samples as a function."""
    location = "the samples given to `adopt`"
    given = read_samples(samples, Make(), operator, location)
    return LocatedSamples(lambda make: given, location)


_OF_CLASSES: dict[str, tuple[Any, str]] = {
    "name": (None, ""),
    "signature": (None, ""),
    "kind": ("true", "; attach `op.surrogate_gradients(...)` to the result"),
    "opaque": (False, ""),
    "deterministic": (True, "; give it torch's tag `nondeterministic_bitwise` in its definition"),
    "mutates": (None, "; its schema shows the arguments that it writes into"),
}
"""Arguments of `adopt` that only a class takes: the default, and advice to add to the error's hint."""


def _refuse_options(subject: Any, /, **given: Any) -> None:
    """Refuse arguments of `adopt` that only a class takes.

    Raises:
        UsageError: If one is given.
    """
    for argument, (default, also) in _OF_CLASSES.items():
        if given[argument] != default:
            raise errors.UsageError(
                f"`{argument}` is for a Function class, not for an operator of torch.library",
                operator=_name(capabilities.overloads_of(subject) or {}),
                argument=argument,
                got=repr(given[argument]),
                hint=f"leave it out{also}",
            )


def overload_of(subject: Any) -> Any:
    """Return the only overload of an operator.

    Raises:
        UsageError: If it has several overloads, is one of torch's own, or cannot be adopted and is not pure.
    """
    overload = _overload(capabilities.overloads_of(subject) or {}, subject)
    signature = capabilities.signature_of(overload)
    if not signature.pure or signature.name.partition("::")[0] in _TORCH_NAMESPACES:
        _refuse(overload, signature)
    return overload


def _overload(overloads: Mapping[str, Any], subject: Any) -> Any:
    if len(overloads) == 1:
        return next(iter(overloads.values()))
    raise errors.UsageError(
        "it has several overloads",
        operator=_name(overloads),
        expected="one of them",
        got=", ".join(f"`{name}`" for name in overloads),
        hint=" or ".join(f"`torch.ops.{subject}.{name}`" for name in overloads),
    )


def _name(overloads: Mapping[str, Any]) -> str:
    """Return the shared name of several overloads, or the full name of a single overload."""
    name = capabilities.signature_of(next(iter(overloads.values()))).name
    return name if len(overloads) == 1 else name.partition(".")[0]


def _refuse(overload: Any, signature: capabilities.OperatorSchema) -> None:
    """Refuse an operator that cannot be adopted, or that has all kernels and rules.

    Raises:
        UsageError: If it cannot be adopted, or has all kernels and rules.
    """
    ours = {each.name for each in declared_operators() if not each.specification.origin.registered}
    refusal: tuple[str, str] | None = None
    if {signature.name, signature.name.removesuffix(HIDDEN_SUFFIX)} & ours:
        refusal = (
            "it is declared with opsmith, and has all kernels and rules",
            "use the handle that `@opsmith.operator` made",
        )
    elif signature.name.partition("::")[0] in _TORCH_NAMESPACES:
        refusal = (
            "it is an operator of torch itself, and torch has its gradients and kernels",
            "declare your own operator that calls it",
        )
    elif signature.views:
        refusal = (
            "its schema shows that it returns a view of an argument, or several arguments",
            "adopt an operator that returns new tensors, or the one argument that it writes into",
        )
    elif capabilities.registers_kernel(overload, COMPOSITE):
        refusal = (
            "it is composite: torch sees the operations in it, and they have all rules",
            "use it unchanged; to check it, declare an operator whose reference calls it",
        )
    elif not has_kernel(overload):
        refusal = "it has no kernel on any device", "import the library that registers its kernels first"
    if refusal is not None:
        problem, hint = refusal
        raise errors.UsageError(problem, operator=signature.name, got=signature.text, hint=hint)
