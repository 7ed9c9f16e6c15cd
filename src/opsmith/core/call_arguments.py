"""Arguments of a call, and functions that take them, checked against the signature of an operator."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from opsmith import errors
from opsmith.core.location import where
from opsmith.core.schema import REQUIRED, Argument, Schema


@dataclass(frozen=True)
class CallArguments:
    """Arguments of one call.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


Fault = tuple[str, str | None, str | None, str | None]


def call_fault(args: tuple[Any, ...], kwargs: dict[str, Any], schema: Schema) -> Fault | None:
    """Return what does not fit in a call as (problem, argument, expected, got); None if all fits."""
    if len(args) > schema.positional:
        taken = f"{schema.positional} positional argument{'s' * (schema.positional != 1)}"
        return f"it takes {taken} and {len(args)} were given", None, None, None
    unknown = [name for name in kwargs if name not in schema.by_name]
    if unknown:
        names = ", ".join(f"`{name}`" for name in schema.names)
        return f"it has no argument `{unknown[0]}`", unknown[0], f"one of {names}", None
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            if argument.name in kwargs:
                return f"`{argument.name}` is given twice", argument.name, None, None
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        elif argument.default is REQUIRED:
            return f"`{argument.name}` is missing", argument.name, argument.kind.annotation(), "nothing"
        else:
            continue
        if not argument.kind.accepts(value):
            name, expected, got = misfit(argument, value)
            return f"`{name}` has the wrong type", name, expected, got
    return None


def misfit(argument: Argument, value: Any) -> tuple[str, str, str]:
    """Return name, expected type and text of a value, or a part of it, that an argument does not accept."""
    structure = argument.kind.structure
    fault = None if structure is None else structure.fault(value)
    if fault is None:
        return argument.name, argument.kind.expected(), shown(value)
    behind, kind, part = fault
    return argument.name + behind, kind.expected(), shown(part)


def shown(value: Any) -> str:
    """Return type and value as text for a message, shortened."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"Tensor of {value.dtype}, shape {list(value.shape)}"
    if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return f"{type(value).__name__} of {', '.join(sorted({type(item).__name__ for item in value}))}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def requires_gradient(values: Iterable[Any]) -> bool:
    """Return True if a tensor among some values, or in a list among them, requires a gradient."""
    return any(tensor.requires_grad for tensor in tensors_in(list(values)))


def tensors_in(values: list[Any]) -> list[torch.Tensor]:
    """List the tensors among argument values, those in lists too."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def check_attached(function: Any, what: str, schema: Schema, operator: str) -> None:
    """Refuse a kernel, fake kernel or stand-in that does not take the operator's arguments.

    Args:
        function: The function to attach; a builtin without a signature is accepted.
        what: Its description in messages.
        schema: The operator's signature.
        operator: The operator's name.

    Raises:
        NotAFunctionError: If it cannot be called so.
    """
    names = ", ".join(f"`{name}`" for name in schema.names)
    if not callable(function):
        raise errors.NotAFunctionError(
            f"{what} is not a function",
            operator=operator,
            expected=f"a function of {names}",
            got=shown(function),
            hint=f"write `def f({', '.join(schema.names)}): ...`",
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    keywords = dict.fromkeys(schema.names[schema.positional :])
    try:
        signature.bind(*schema.names[: schema.positional], **keywords)
    except TypeError as error:
        raise errors.NotAFunctionError(
            f"{what} cannot be called as the operator is: {error}",
            operator=operator,
            expected=f"a function of {names}",
            got=f"{getattr(function, '__name__', 'a function')}{signature}",
            where=where(function),
            hint=f"write `def f({', '.join(schema.names)}): ...`, even if it uses only some",
        ) from error
