"""Signature of an adopted class: the arguments of its `forward`.

A type comes from `signature=`; else from the annotation; else from default and samples; else it is Tensor.
"""

from __future__ import annotations

import collections.abc
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from opsmith import errors
from opsmith.core.annotations import kind_of
from opsmith.core.argument_types import NUMBER, OBJECT, TENSOR, VALUE_TYPES, ArgumentType, ValueType
from opsmith.core.results import RESERVED
from opsmith.core.schema import REQUIRED, Argument, refuse_unwritable

Signature = str | Callable[..., Any] | None


def forward_signature(function_class: type[torch.autograd.Function]) -> inspect.Signature:
    """Return the signature of a class's forward, without its context."""
    function: Any = function_class.forward
    signature = inspect.signature(function)
    if function_class.setup_context is not torch.autograd.Function.setup_context:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def stated_signature(signature: Signature, operator: str) -> inspect.Signature | None:
    """Return `signature=`, a text in Python's notation or a function with annotations, as a signature.

    Raises:
        UsageError: If it is neither.
    """
    if signature is None:
        return None
    names: dict[str, Any] = {**vars(typing), **vars(collections.abc), "torch": torch, "Tensor": torch.Tensor}
    try:
        if not callable(signature):
            # The future import of this module must not apply: it would turn annotations into text.
            exec(compile(f"def stated{signature}: ...", "<signature>", "exec", dont_inherit=True), names)
        return _resolved(names["stated"] if isinstance(signature, str) else signature)
    except (SyntaxError, NameError, TypeError, AttributeError, ValueError) as error:
        raise errors.UsageError(
            f"`signature` cannot be read: {error}",
            operator=operator,
            argument="signature",
            expected="a function with type hints, or what stands after its name",
            got=repr(signature),
            hint='write `signature="(x: Tensor, dim: int = 1) -> Tensor"`',
        ) from error


def resolved(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature with its annotations resolved, or without them, as for a builtin."""
    try:
        return _resolved(function)
    except ValueError:
        return inspect.Signature()
    except (NameError, AttributeError, TypeError, SyntaxError):
        unknown = inspect.signature(function)
        parameters = [each.replace(annotation=REQUIRED) for each in unknown.parameters.values()]
        return unknown.replace(parameters=parameters, return_annotation=REQUIRED)


def _resolved(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    parameters = [
        parameter.replace(annotation=hints.get(parameter.name, REQUIRED))
        for parameter in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters, return_annotation=hints.get("return", REQUIRED))


def arguments_of(
    function_class: type[torch.autograd.Function],
    stated: inspect.Signature | None,
    samples: Sequence[Sequence[Any]],
) -> tuple[tuple[Argument, ...], bool]:
    """Return the arguments of the operator of a class, and True if the last is the list for `*args`.

    Raises:
        ParameterKindError, UsageError: If `forward` has a parameter that `apply` never passes, or does not
            fit `signature=`.
        MissingAnnotationError: If the types of `*args` are not declared and cannot be inferred.
        NameFormatError: If a name is not valid in torch's schemas.
    """
    every = list(forward_signature(function_class).parameters.values())
    _refuse_keywords(every, function_class)
    written = [each for each in every if each.kind not in _BY_KEYWORD]
    known = resolved(inspect.unwrap(function_class.forward)).parameters
    hints = {name: parameter.annotation for name, parameter in known.items()}
    described = list(written if stated is None else stated.parameters.values())
    variadic = bool(written) and written[-1].kind is inspect.Parameter.VAR_POSITIONAL
    fixed = len(written) - variadic
    if stated is not None and (len(described) < fixed or (len(described) > fixed and not variadic)):
        raise errors.UsageError(
            f"`signature` does not fit `{function_class.__qualname__}.forward`",
            argument="signature",
            expected=f"{fixed} argument{'s' * (fixed != 1)}: {', '.join(p.name for p in written)}",
            got=f"{len(described)}: {', '.join(p.name for p in described)}",
            hint="name the arguments of forward, without `ctx`, in its order",
        )
    arguments: list[Argument] = []
    for position, parameter in enumerate(described):
        refuse_unwritable(parameter.name)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            hint = parameter.annotation if stated is not None else hints.get(parameter.name, REQUIRED)
            return _rest(parameter, position, hint, arguments, samples, function_class)
        shown = [sample[position] for sample in samples if position < len(sample)]
        hint = parameter.annotation if stated is not None else hints.get(parameter.name, REQUIRED)
        kind = None if hint is REQUIRED else kind_of(hint)
        if kind is None and (hint is REQUIRED or (hint is Any and stated is None)):
            kind = kind_of_values(shown, parameter.default)
        if kind is None and torch.Tensor in typing.get_args(hint):
            raise _tensor_or_not(parameter, hint)
        arguments.append(_argument(parameter, kind or ANYTHING))
    return tuple(arguments), False


def without_defaults(arguments: Sequence[Argument]) -> tuple[tuple[Argument, ...], dict[str, Any]]:
    """Return the arguments without defaults that a schema cannot write, and these defaults.

    An argument after one without a default cannot have one in a schema either, and one before it must not, so
    that a call by position means the same.
    """
    plain = [each.default in (None, REQUIRED) or each.kind.base is not OBJECT for each in arguments]
    writable = all(plain) and not any(
        isinstance(each.default, list | tuple) and each.kind.base is VALUE_TYPES[str] for each in arguments
    )
    if writable:
        return tuple(arguments), {}
    left_out = {each.name: each.default for each in arguments if each.default is not REQUIRED}
    return tuple(replace(each, default=REQUIRED) for each in arguments), left_out


_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters that `apply` never passes, which keep their default."""

ANYTHING = ArgumentType(OBJECT, optional=True)
"""Type of a value that no schema can carry."""


def _rest(
    parameter: inspect.Parameter,
    position: int,
    hint: Any,
    arguments: list[Argument],
    samples: Sequence[Sequence[Any]],
    function_class: type[torch.autograd.Function],
) -> tuple[tuple[Argument, ...], bool]:
    """Return all arguments, those of `*args` as a list of one type, or one by one as in the samples."""
    rest = [value for sample in samples for value in sample[position:]]
    kind = kind_of(list[hint]) if hint not in (REQUIRED, Any) else None
    if kind is None and rest and all(isinstance(value, torch.Tensor) for value in rest):
        kind = ArgumentType(TENSOR, sequence=True)
    if kind is not None:
        return (*arguments, Argument(parameter.name, kind)), True
    if len({len(sample) for sample in samples}) != 1:
        raise _unknown_rest(parameter, function_class)
    columns = list(zip(*(sample[position:] for sample in samples), strict=True))
    named = [
        Argument(f"{parameter.name}{i}", kind_of_values(column, REQUIRED)) for i, column in enumerate(columns)
    ]
    return (*arguments, *named), False


def _argument(parameter: inspect.Parameter, kind: ArgumentType) -> Argument:
    name, default = parameter.name, parameter.default
    if name.startswith(RESERVED):
        name = f"{name}_"  # formulas use these names for gradients and results
    if default is None and not kind.optional:
        kind = replace(kind, optional=True)
    if default is not REQUIRED and not kind.accepts(default):
        kind = ANYTHING
    if default is not REQUIRED and kind.base is VALUE_TYPES[float] and type(default) is int:
        default = float(default)
    return Argument(name, kind, default)


def kind_of_values(values: Sequence[Any], default: Any) -> ArgumentType:
    """Return the type that fits observed values and a default; Tensor if there are none.

    Example:
        >>> kind_of_values([torch.ones(2), None], REQUIRED).annotation()
        'Tensor | None'
        >>> kind_of_values([], 3).annotation()
        'int | float'
    """
    every = [*values, *([] if default is REQUIRED else [default])]
    optional = any(value is None for value in every)
    present = [value for value in every if value is not None]
    if not present:  # nothing is known, so that None is possible too
        return ArgumentType(TENSOR, optional=optional or not values)
    for kind in (_single(present), _listed(present)):
        if kind is not None:
            return replace(kind, optional=optional)
    return ANYTHING


def _single(values: Sequence[Any]) -> ArgumentType | None:
    base = _base(values)
    return None if base is None else ArgumentType(base)


def _listed(values: Sequence[Any]) -> ArgumentType | None:
    types = set(map(type, values))
    if len(types) > 1 or not types <= {list, tuple, torch.Size}:
        return None
    items = {type(item) for value in values for item in value}
    base = VALUE_TYPES.get(items.pop()) if len(items) == 1 else None
    if base is None or base is TENSOR:
        return None
    return ArgumentType(base, sequence=True, as_tuple=types != {list})


def _base(values: Sequence[Any]) -> ValueType | None:
    """Return the type of single values; a number without an annotation may be int or float."""
    types = {type(value) for value in values}
    if types and all(issubclass(each, torch.Tensor) for each in types):
        return TENSOR
    if types in ({int}, {float}, {int, float}):
        return NUMBER if types != {float} else VALUE_TYPES[float]
    if len(types) == 1:
        return VALUE_TYPES.get(next(iter(types)))
    return None


def _tensor_or_not(parameter: inspect.Parameter, hint: Any) -> errors.UnsupportedTypeError:
    return errors.UnsupportedTypeError(
        f"`{parameter.name}` is a tensor in some calls and something else in others",
        argument=parameter.name,
        expected="a type that is Tensor, or one without it",
        got=str(hint).replace("torch.Tensor", "Tensor"),
        hint="adopt the class once for each, under two names, with a `signature=` each",
    )


def _refuse_keywords(parameters: Sequence[inspect.Parameter], function_class: type) -> None:
    for parameter in parameters:
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required:
            raise errors.ParameterKindError(
                f"`{function_class.__qualname__}.forward` takes `{parameter.name}` by keyword, which `apply` "
                "never gives",
                argument=parameter.name,
                hint="take it by position",
            )


def _unknown_rest(parameter: inspect.Parameter, function_class: type) -> errors.MissingAnnotationError:
    return errors.MissingAnnotationError(
        f"`{function_class.__qualname__}.forward` takes `*{parameter.name}`, whose number and types "
        "are not declared",
        argument=parameter.name,
        hint='give `samples=`, all with as many arguments, or `signature="(*tensors: Tensor) -> Tensor"`',
    )
