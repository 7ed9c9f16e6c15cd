"""Signature of an adopted class: the arguments of its `forward`.

A type comes from `signature=`; else from the annotation, if it accepts all observed values; else from the
values observed in samples and calls, and the default; else it is Tensor.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from opsmith import errors
from opsmith.core.annotations import kind_of
from opsmith.core.argument_types import NUMBER, OBJECT, TENSOR, VALUE_TYPES, ArgumentType, ValueType
from opsmith.core.call_arguments import reordered
from opsmith.core.forward_arguments import Form, ForwardArguments, Slot
from opsmith.core.lowering import holds_tensor
from opsmith.core.results import RESERVED
from opsmith.core.schema import REQUIRED, Argument, refuse_unwritable

Signature = str | Callable[..., Any] | None


def forward_signature(function_class: type[torch.autograd.Function]) -> inspect.Signature:
    """Return the signature of a class's forward without its context, its annotations resolved if possible."""
    signature = resolved(inspect.unwrap(function_class.forward))
    if function_class.setup_context is not torch.autograd.Function.setup_context:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def value_names(function_class: type[torch.autograd.Function], count: int) -> list[str]:
    """Return forward's names for this number of values; the values of `*xs` are `xs[0]`, `xs[1]`, ..."""
    every = forward_signature(function_class).parameters.values()
    found = [each for each in every if each.kind is not inspect.Parameter.VAR_KEYWORD]  # `apply` has none
    names = [each.name for each in found]
    if found and found[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        rest = names.pop()
        names += [f"{rest}[{position}]" for position in range(count - len(names))]
    return names[:count]


def stated_signature(signature: Signature, operator: str) -> inspect.Signature | None:
    """Return `signature=` as a signature; it is a text in Python's notation, or an annotated function.

    Raises:
        UsageError: If it is neither.
    """
    if signature is None:
        return None
    names: dict[str, Any] = {**vars(typing), **vars(collections.abc), "torch": torch, "Tensor": torch.Tensor}
    try:
        if not callable(signature):
            # The future import of this module must not apply here: it would turn annotations into text.
            exec(compile(f"def stated{signature}: ...", "<signature>", "exec", dont_inherit=True), names)
        return _resolved(names["stated"] if isinstance(signature, str) else signature)
    except (SyntaxError, NameError, TypeError, AttributeError, ValueError) as error:
        raise errors.UsageError(
            f"`signature` cannot be read: {error}",
            operator=operator,
            argument="signature",
            expected="a function with type hints, or the text after a function's name",
            got=repr(signature),
            hint='write `signature="(x: Tensor, dim: int = 1) -> Tensor"`',
        ) from error


def resolved(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature with resolved annotations; without annotations, as for a builtin."""
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
    observed: Sequence[Sequence[Any]],
) -> tuple[tuple[Argument, ...], ForwardArguments]:
    """Return the arguments of a class's operator, and the parameters of forward that they carry.

    Args:
        function_class: The class.
        stated: `signature=`, if it was given.
        observed: Arguments observed in samples and calls.

    Raises:
        ParameterKindError, UsageError: If `forward` has a required parameter that `apply` never passes, or
            does not fit `signature=`.
        NameFormatError: If a name is not valid in torch's schemas.
    """
    every = list(forward_signature(function_class).parameters.values())
    _refuse_keywords(every, function_class)
    written = [each for each in every if each.kind not in _BY_KEYWORD]
    described = list(written if stated is None else stated.parameters.values())
    variadic = bool(written) and written[-1].kind is inspect.Parameter.VAR_POSITIONAL
    fixed = len(written) - variadic
    names = [[each.name for each in listed] for listed in (described, written)]
    if len(described) < fixed or (len(described) > fixed and not variadic) or reordered(*names):
        raise errors.UsageError(
            f"`signature` does not fit `{function_class.__qualname__}.forward`",
            argument="signature",
            expected=f"{fixed} argument{'s' * (fixed != 1)}: {', '.join(names[1])}",
            got=f"{len(described)}: {', '.join(names[0])}",
            hint="name the arguments of forward, without `ctx`, in its order",
        )
    carriers = _Carriers(names[0])
    for position, parameter in enumerate(described):
        refuse_unwritable(parameter.name)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            _add_rest(carriers, parameter, parameter.annotation, [values[position:] for values in observed])
            break
        shown = [values[position] for values in observed if position < len(values)]
        form, kind = _form(parameter.annotation, shown, parameter.default, stated is not None)
        carriers.add(parameter, form, kind)
    return tuple(carriers.arguments), ForwardArguments(tuple(carriers.slots))


class _Carriers:
    """Arguments of the operator that carry the arguments of forward.

    Args:
        taken: Names that are already used, and that no argument for a value may have.
    """

    def __init__(self, taken: Sequence[str]) -> None:
        self.taken = set(taken)
        self.arguments: list[Argument] = []
        self.slots: list[Slot] = []

    def add(self, parameter: inspect.Parameter, form: Form, kind: ArgumentType) -> None:
        """Add the arguments for one parameter."""
        argument = _argument(parameter, kind)
        if form in ("plain", "rest"):
            self.arguments.append(argument)
            self.slots.append(Slot(argument.name, form))
            return
        value = f"{argument.name}_value"
        while value in self.taken:
            value += "_"
        self.taken.add(value)
        self.arguments += [argument, Argument(value, ANYTHING)]
        self.slots.append(Slot(argument.name, form, value))


def _form(hint: Any, shown: Sequence[Any], default: Any, stated: bool) -> tuple[Form, ArgumentType]:
    """Return the form of a parameter, and the type of the argument that carries it or its tensors."""
    kind = None if hint is REQUIRED else kind_of(hint)
    if kind is not None and (stated or all(value is None or kind.accepts(value) for value in shown)):
        if any(value is None for value in shown) and not stated:
            kind = replace(kind, optional=True)
        if kind.base is not TENSOR or kind.sequence or not _has_value(default) or kind.accepts(default):
            return "plain", kind
    every = [*shown, *([] if default is REQUIRED else [default])]
    if stated or not shown:
        if _either_by_hint(hint):
            return "either", _OPTIONAL_TENSOR
        if hint not in (REQUIRED, Any) and (stated or kind is None):
            return "plain", kind or ANYTHING
        if hint is Any and stated:
            return "plain", ANYTHING
    if any(holds_tensor(value) and not isinstance(value, torch.Tensor) for value in every):
        return "nested", ArgumentType(TENSOR, sequence=True)
    tensors = [isinstance(value, torch.Tensor) for value in every if value is not None]
    if any(tensors) and not all(tensors):
        return "either", _OPTIONAL_TENSOR
    return "plain", kind_of_values(shown, default)


def _either_by_hint(hint: Any) -> bool:
    """Return True for the annotation of a tensor or something else, such as `float | Tensor`."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return is_union and torch.Tensor in typing.get_args(hint)


def _has_value(default: Any) -> bool:
    return default is not None and default is not REQUIRED  # by identity: an array compares elements


def without_defaults(
    arguments: Sequence[Argument], parameters: ForwardArguments
) -> tuple[tuple[Argument, ...], dict[str, Any]]:
    """Return the arguments without the defaults that a schema cannot express, and those defaults by name.

    In a schema, no argument with a default may precede an argument without one. So defaults before and after
    such an argument are removed as well, and a call by position means the same.
    """
    plain = [not _has_value(each.default) or each.kind.base not in (OBJECT, TENSOR) for each in arguments]
    writable = all(plain) and not any(
        isinstance(each.default, list | tuple) and each.kind.base is VALUE_TYPES[str] for each in arguments
    )
    if writable and parameters.plain:
        return tuple(arguments), {}
    left_out = {each.name: each.default for each in arguments if each.default is not REQUIRED}
    return tuple(replace(each, default=REQUIRED) for each in arguments), left_out


_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters that `apply` never passes; they keep their default."""

ANYTHING = ArgumentType(OBJECT, optional=True)
"""Type of a value that no schema can carry."""


_OPTIONAL_TENSOR = ArgumentType(TENSOR, optional=True)


def _add_rest(
    carriers: _Carriers, parameter: inspect.Parameter, hint: Any, observed: Sequence[Sequence[Any]]
) -> None:
    """Add the arguments for `*args`: a list if all have one type, else one argument per observed value."""
    rest = [value for values in observed for value in values]
    kind = kind_of(list[hint]) if hint not in (REQUIRED, Any) else None
    if kind is not None and all(kind.accepts([value]) for value in rest):
        carriers.add(parameter, "rest", kind)
    elif all(isinstance(value, torch.Tensor) for value in rest):
        carriers.add(parameter, "rest", ArgumentType(TENSOR, sequence=True))
    elif len({len(values) for values in observed}) != 1 or any(map(holds_tensor, _containers(rest))):
        carriers.add(parameter, "mixed", ArgumentType(TENSOR, sequence=True))
    else:
        for position, column in enumerate(zip(*observed, strict=True)):
            one = inspect.Parameter(f"{parameter.name}{position}", parameter.POSITIONAL_ONLY)
            carriers.add(one, *_form(REQUIRED, column, REQUIRED, False))


def _containers(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if not isinstance(value, torch.Tensor)]


def _argument(parameter: inspect.Parameter, kind: ArgumentType) -> Argument:
    name, default = parameter.name, parameter.default
    if name.startswith(RESERVED):
        name = f"{name}_"  # formulas use this name for a gradient or result
    if default is None and not kind.optional:
        kind = replace(kind, optional=True)
    if default is not REQUIRED and not kind.accepts(default) and not kind.is_tensor:
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
    if not present:  # nothing is known, so None is possible, too
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


def _refuse_keywords(parameters: Sequence[inspect.Parameter], function_class: type) -> None:
    for parameter in parameters:
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required:
            raise errors.ParameterKindError(
                f"`{function_class.__qualname__}.forward` takes `{parameter.name}` by keyword, but `apply` "
                "passes no keywords",
                argument=parameter.name,
                hint="take it by position",
            )
