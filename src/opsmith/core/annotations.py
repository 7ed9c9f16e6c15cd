"""Annotations of a reference: the type of the argument, or a hint if none can carry it."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum, Flag
from typing import Any, Union

import torch

from opsmith.core.argument_types import (
    FLOAT,
    INT,
    NUMBER,
    TENSOR,
    VALUE_TYPES,
    ArgumentType,
    Structure,
    ValueType,
    enum_base,
    literal_base,
)

# Hints for annotations that no schema can carry.
_HINTS: list[tuple[Callable[[Any], bool], str]] = [
    (lambda annotation: annotation is torch.nn.Parameter, "annotate it as `Tensor`; a Parameter is a Tensor"),
    (lambda annotation: annotation is inspect.Parameter.empty, "add a type hint"),
    (
        lambda annotation: typing.get_origin(annotation) is dict or annotation is dict,
        "pass each of its values as a separate argument",
    ),
    (
        lambda annotation: (
            annotation is Callable
            or typing.get_origin(annotation) is Callable
            or "Callable" in str(annotation)
        ),
        "declare one operator per function, or pass a `str` that selects the function",
    ),
    (lambda annotation: annotation in (list, tuple, Sequence), "add the type of its items: `list[int]`"),
    (
        lambda annotation: getattr(annotation, "__module__", "").startswith("numpy"),
        "take a `Tensor` and convert inside with `.numpy()`",
    ),
    (
        lambda annotation: typing.get_origin(annotation) is typing.Literal,
        "make all its values strings, or all whole numbers",
    ),
    (lambda annotation: _is_class(annotation, Flag), "annotate it as `int`, and call it with `flags.value`"),
    (lambda annotation: annotation in (object, Any), "write an exact type, such as `Tensor` or `float`"),
    (lambda annotation: annotation is torch.nn.Module, "take its parameters as `Tensor` arguments"),
]


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function, resolved as by `typing.get_type_hints`.

    `get_type_hints` compiles each text, which takes long for all functions of a program. Most texts are names
    of classes, which are looked up here.

    Args:
        function: A function of Python, or a method.

    Raises:
        NameError, AttributeError, TypeError, SyntaxError: If an annotation cannot be resolved.

    Example:
        >>> def scaled(x: "torch.Tensor", by: "float") -> "int | None": ...
        >>> hints_of(scaled)
        {'x': <class 'torch.Tensor'>, 'by': <class 'float'>, 'return': int | None}
    """
    if getattr(function, "__no_type_check__", False):
        return {}
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    hints = dict(function.__annotations__)
    parameters = getattr(function, "__type_params__", ())  # their names come before those of the module
    for name, annotation in hints.items() if not parameters else ():
        named = scope.get(annotation, vars(builtins).get(annotation)) if isinstance(annotation, str) else None
        hints[name] = named if isinstance(named, type) else annotation
    rest = {name: hint for name, hint in hints.items() if not isinstance(hint, type)}
    if rest:
        holder = types.SimpleNamespace(__annotations__=rest, __type_params__=parameters)
        hints.update(typing.get_type_hints(holder, scope))
    return hints


def hint_for(annotation: Any) -> str:
    """Return the hint for an annotation that is not supported."""
    try:
        _structure(annotation, optional=False)
        optional, members = _split_union(annotation)
        if len(members) == 1:
            _structure(members[0], optional=optional)
    except _UnfitError as unfit:
        return unfit.hint
    for matches, hint in _HINTS:
        if matches(annotation):
            return hint
    return "use Tensor, int, float, bool, str, complex, torch.dtype, torch.device, a list or `| None` of one"


def kind_of(annotation: Any) -> ArgumentType | None:
    """Return the type of an argument with this annotation; None if the annotation is not supported.

    Example:
        >>> kind_of(int | tuple[int, int]).schema()
        'SymInt[2]'
        >>> kind_of(torch.Tensor | None).schema()
        'Tensor?'
    """
    optional, members = _split_union(annotation)
    if len(members) == 1:
        try:
            kind = _single(members[0], optional) or _structure(members[0], optional=optional)
        except _UnfitError:
            kind = None
    elif set(members) == {int, float}:
        kind = ArgumentType(NUMBER, optional)
    elif len(members) == 2:
        kind = _spread(members, optional)
    else:
        kind = None
    return kind


def _split_union(annotation: Any) -> tuple[bool, list[Any]]:
    if typing.get_origin(annotation) not in (Union, types.UnionType):
        return False, [annotation]
    members = typing.get_args(annotation)
    return type(None) in members, [member for member in members if member is not type(None)]


def _single(annotation: Any, optional: bool) -> ArgumentType | None:
    base = _base(annotation)
    if base is not None:
        # `None` may be one of the values of a `Literal`.
        return ArgumentType(base, optional or None in typing.get_args(annotation))
    origin, items = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (list, Sequence) and len(items) == 1:
        return _sequence(items[0], optional, length=None, as_tuple=False)
    if origin is tuple and len(items) == 2 and items[1] is Ellipsis:
        return _sequence(items[0], optional, length=None, as_tuple=True)
    if origin is tuple and items and all(item == items[0] for item in items):
        return _sequence(items[0], optional, length=len(items), as_tuple=True)
    return None


def _base(annotation: Any) -> ValueType | None:
    if typing.get_origin(annotation) is typing.Literal:
        return literal_base(tuple(value for value in typing.get_args(annotation) if value is not None))
    if not isinstance(annotation, type):
        return None
    return VALUE_TYPES.get(annotation) or (enum_base(annotation) if issubclass(annotation, Enum) else None)


def _is_class(annotation: Any, base: type) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, base)


class _UnfitError(Exception):
    """A structure that cannot be split into parts without loss, with the hint of the error."""

    def __init__(self, hint: str) -> None:
        super().__init__(hint)
        self.hint = hint


def _structure(annotation: Any, *, optional: bool) -> ArgumentType | None:
    """Return the type for a frozen dataclass, a named tuple, or a tuple of different types; else None."""
    hints = _parts(annotation)
    if hints is None:
        return None
    name = (
        annotation.__name__
        if isinstance(annotation, type)
        else str(annotation).replace("torch.Tensor", "Tensor")
    )
    if optional:
        raise _UnfitError("take its parts as separate arguments, each with `| None`")
    parts: dict[str, ArgumentType] = {}
    for part, inside in hints.items():
        kind = kind_of(inside)
        if kind is None:
            raise _UnfitError(f"`{part}` of `{name}`: {hint_for(inside)}")
        if kind.is_tensor:
            raise _UnfitError(f"take the tensors of `{name}` as separate arguments")
        parts[part] = kind
    exact: Any = tuple if typing.get_origin(annotation) is tuple else annotation
    structure = Structure(exact, parts, issubclass(exact, tuple))
    return ArgumentType(ValueType(structure.annotation(), "", structure.accepts), structure=structure)


def _parts(annotation: Any) -> dict[str, Any] | None:
    """Return the annotation of each part of a structure, by name."""
    if _is_tuple(annotation):
        items = typing.get_args(annotation)
        if not items or Ellipsis in items:
            return None
        return {str(position): item for position, item in enumerate(items)}
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, tuple) and hasattr(annotation, "_fields"):
        names, hints = list(inspect.signature(annotation).parameters), _resolved(annotation)
        if set(hints) != set(names):
            untyped = f"give every field of `{annotation.__name__}` a type hint: derive it from `NamedTuple`"
            raise _UnfitError(untyped)
        return {name: hints[name] for name in names}
    if not dataclasses.is_dataclass(annotation):
        return None
    if not annotation.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # every dataclass has them
        raise _UnfitError(f"write `@dataclass(frozen=True)` over `{annotation.__name__}`")
    fields = dataclasses.fields(annotation)
    if {each.name for each in fields if each.init} != set(
        inspect.signature(annotation).parameters
    ) or not all(each.init for each in fields):
        raise _UnfitError(f"give `{annotation.__name__}` no other arguments than its fields")
    hints = _resolved(annotation)
    return {each.name: hints[each.name] for each in fields}


def _resolved(annotation: type) -> dict[str, Any]:
    """Return the annotations of a class, resolved."""
    try:
        return typing.get_type_hints(annotation)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise _UnfitError(
            f"use only names of its module in the type hints of `{annotation.__name__}`: {error}"
        ) from error


def _sequence(item: Any, optional: bool, *, length: int | None, as_tuple: bool) -> ArgumentType | None:
    item_optional, members = _split_union(item)
    base = _base(members[0]) if len(members) == 1 else None
    if base is None or (item_optional and base is not TENSOR) or (length is not None and base is TENSOR):
        return None
    return ArgumentType(base, optional, True, length, item_optional, False, as_tuple)


def _is_tuple(annotation: Any) -> bool:
    origin: Any = typing.get_origin(annotation)
    return origin is tuple


def _spread(members: list[Any], optional: bool) -> ArgumentType | None:
    """Return the type for `int | tuple[int, int]`, `int | list[int]`, or these with floats, in any order."""
    single, several = sorted(members, key=_is_tuple)
    kind = _single(several, optional)
    if (
        kind is None
        or not kind.sequence
        or kind.base not in (INT, FLOAT)
        or VALUE_TYPES.get(single) is not kind.base
    ):
        return None
    return ArgumentType(kind.base, optional, True, kind.length, False, True, kind.as_tuple)


def shown_annotation(annotation: Any) -> str:
    """Return the text of an annotation, for messages."""
    if annotation is types.NoneType:
        return "None"
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("torch.Tensor", "Tensor").replace("typing.", "")
