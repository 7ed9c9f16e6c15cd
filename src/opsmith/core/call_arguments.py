"""Arguments of a call, and functions that take them, checked against the signature of an operator."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opsmith import errors
from opsmith.core.argument_types import FLOAT, STR, is_no_utf_8
from opsmith.core.formula import listed
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


def call_error(args: tuple[Any, ...], kwargs: dict[str, Any], schema: Schema) -> errors.ArgumentError | None:
    """Return the error for a call that does not fit the signature, without operator and hint, or None."""
    if len(args) > schema.positional:
        taken = f"{schema.positional} positional argument{'s' * (schema.positional != 1)}"
        return errors.ArgumentError(f"it takes {taken}, but {len(args)} were given")
    unknown = next((name for name in kwargs if name not in schema.by_name), None)
    if unknown is not None:
        expected = f"one of {listed(schema.names)}"
        return errors.ArgumentError(f"it has no argument `{unknown}`", argument=unknown, expected=expected)
    fault: tuple[Argument, Any] | None = None
    for position, argument in enumerate(schema.arguments):
        name = argument.name
        if position < len(args):
            if name in kwargs:
                return errors.ArgumentError(f"`{name}` is given twice", argument=name)
            value = args[position]
        elif name in kwargs:
            value = kwargs[name]
        elif argument.default is REQUIRED:
            expected = argument.kind.annotation()
            return errors.ArgumentError(
                f"`{name}` is missing", argument=name, expected=expected, got="nothing"
            )
        else:
            continue
        if not argument.kind.accepts(value):
            if not argument.kind.converts(value):
                return type_error(argument, value)
            # The call takes this value: the fault may be in another argument.
            fault = fault or (argument, value)
    return None if fault is None else type_error(*fault)


def type_error(argument: Argument, value: Any) -> errors.ArgumentError:
    """Return the error for a value, or a part of it, that an argument does not accept."""
    name, kind, structure = argument.name, argument.kind, argument.kind.structure
    fault = None if structure is None else structure.fault(value)
    if fault is not None:
        behind, kind, value = fault
        name += behind
    problem, expected, got = f"`{name}` has the wrong type", kind.expected(), shown(value)
    if kind.is_exceeded(value):
        problem = f"`{name}` is a number that torch cannot store"
        expected = f"{'a float' if kind.base is FLOAT else 'an int'} of 64 bits"
    if kind.base is STR and is_no_utf_8(value):
        problem, expected = f"`{name}` is a string that torch cannot store", "a str that UTF-8 can encode"
    return errors.ArgumentError(problem, argument=name, expected=expected, got=got)


def shown(value: Any) -> str:
    """Return type and value as text for a message, shortened."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"Tensor of {value.dtype}, shape {list(value.shape)}"
    if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return f"{type(value).__name__} of {', '.join(sorted({str(type(item).__name__) for item in value}))}"
    if torch.compiler.is_dynamo_compiling():  # there, an array cannot be converted to text
        return type(value).__name__
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def requires_gradient(values: Iterable[Any]) -> bool:
    """Return True if a tensor among some values, or in a list among them, requires a gradient."""
    return any(tensor.requires_grad for tensor in tensors_in(list(values)))


def tensors_in(values: list[Any]) -> list[torch.Tensor]:
    """List the tensors among argument values, including tensors in lists."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def check_attached(
    function: Any, what: str, schema: Schema, operator: str, forward: Sequence[str] | None = None
) -> None:
    """Refuse a kernel, fake kernel or stand-in that does not take the operator's arguments.

    Args:
        function: The function to attach; a builtin without a signature is accepted.
        what: Its description in messages.
        schema: The operator's signature.
        operator: The operator's name.
        forward: Names of its positional parameters, if they are not the operator's arguments: the parameters
            of `forward`, the last of which may collect several values.

    Raises:
        NotAFunctionError: If it cannot be called with these arguments, or has their names in another order.
    """
    names = list(schema.names if forward is None else forward)
    if not callable(function):
        raise errors.NotAFunctionError(
            f"{what} is not a function",
            operator=operator,
            expected=f"a function of {listed(names)}",
            got=shown(function),
            hint=f"write `def f({', '.join(names)}): ...`",
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    by_position = names if forward is not None else names[: schema.positional]
    reason = None
    try:
        if forward is None:
            signature.bind(*by_position, **dict.fromkeys(names[schema.positional :]))
    except TypeError as error:
        problem, reason = f"cannot be called like the operator: {error}", error
        expected, hint = f"a function of {listed(names)}", "even if it uses only some of them"
    else:
        if not reordered(positional_names(signature), by_position):
            return
        problem = REORDERED
        expected, hint = f"f({', '.join(names)})", "in this order, or give its parameters different names"
    raise errors.NotAFunctionError(
        f"{what} {problem}",
        operator=operator,
        expected=expected,
        got=f"{getattr(function, '__name__', 'a function')}{signature}",
        where=where(function),
        hint=f"write `def f({', '.join(names)}): ...`, {hint}",
    ) from reason


REORDERED = "has the operator's argument names in another order, but gets the arguments by position"
"""Fault of a function whose parameters are `reordered`, for messages."""


def positional_names(signature: inspect.Signature) -> list[str]:
    """Return the names of the parameters that a call by position fills, except `*args`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in signature.parameters.values() if each.kind in kinds]


def reordered(parameters: Sequence[str], names: Sequence[str]) -> bool:
    """Return True if positional parameters have some of the arguments' names, but in another order.

    Example:
        >>> reordered(("y", "x", "k"), ("x", "y", "by")), reordered(("a", "x"), ("x", "y"))
        (True, False)
    """
    gets = {name: given for name, given in zip(parameters, names, strict=False) if name != given}
    while ends := [name for name, given in gets.items() if given not in gets]:
        for name in ends:
            del gets[name]
    return bool(gets)
