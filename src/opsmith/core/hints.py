"""From a type hint to the kind of an argument, or to what to write instead."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum, Flag
from typing import Any, Union

import torch

from opsmith.core.bases import BASES, FLOAT, INT, NUMBER, TENSOR, Base
from opsmith.core.encoded import enum_base, literal_base
from opsmith.core.kinds import Kind, Structure

# What to write instead of a hint that no schema can carry.
_MENDS: list[tuple[Callable[[Any], bool], str]] = [
    (lambda hint: hint is torch.nn.Parameter, "annotate it as `Tensor`; a Parameter is one"),
    (lambda hint: hint is inspect.Parameter.empty, "add a type hint"),
    (
        lambda hint: typing.get_origin(hint) is dict or hint is dict,
        "pass its values as arguments of their own",
    ),
    (
        lambda hint: hint is Callable or typing.get_origin(hint) is Callable or "Callable" in str(hint),
        "declare one operator per function, or pass a `str` that chooses one",
    ),
    (lambda hint: hint in (list, tuple, Sequence), "say what it holds, for example `list[int]`"),
    (
        lambda hint: getattr(hint, "__module__", "").startswith("numpy"),
        "take a `Tensor` and convert inside with `.numpy()`",
    ),
    (
        lambda hint: typing.get_origin(hint) is typing.Literal,
        "let its values be all strings or all whole numbers",
    ),
    (lambda hint: _is_class(hint, Flag), "annotate it as `int`, and call it with `flags.value`"),
    (lambda hint: hint in (object, Any), "say which type it is, for example `Tensor` or `float`"),
    (lambda hint: hint is torch.nn.Module, "take its parameters as `Tensor` arguments"),
]


def mend_for(hint: Any) -> str:
    """What to write instead of an annotation that is not supported."""
    try:
        _structure(hint, optional=False)
        optional, members = _split_union(hint)
        if len(members) == 1:
            _structure(members[0], optional=optional)
    except _UnfitError as unfit:
        return unfit.mend
    for matches, mend in _MENDS:
        if matches(hint):
            return mend
    return "use Tensor, int, float, bool, str, complex, torch.dtype, torch.device, a list or `| None` of one"


def kind_of(hint: Any) -> Kind | None:
    """The kind for a type hint, or None where there is none.

    Example:
        >>> kind_of(int | tuple[int, int]).schema()
        'int[2]'
        >>> kind_of(torch.Tensor | None).schema()
        'Tensor?'
    """
    optional, members = _split_union(hint)
    if len(members) == 1:
        try:
            kind = _single(members[0], optional) or _structure(members[0], optional=optional)
        except _UnfitError:
            kind = None
    elif set(members) == {int, float}:
        kind = Kind(NUMBER, optional)
    elif len(members) == 2:
        kind = _spread(members, optional)
    else:
        kind = None
    return kind


def _split_union(hint: Any) -> tuple[bool, list[Any]]:
    if typing.get_origin(hint) not in (Union, types.UnionType):
        return False, [hint]
    members = typing.get_args(hint)
    return type(None) in members, [member for member in members if member is not type(None)]


def _single(hint: Any, optional: bool) -> Kind | None:
    base = _base(hint)
    if base is not None:
        # `None` may be one of the values of a `Literal`.
        return Kind(base, optional or None in typing.get_args(hint))
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, Sequence) and len(items) == 1:
        return _sequence(items[0], optional, length=None, as_tuple=False)
    if origin is tuple and len(items) == 2 and items[1] is Ellipsis:
        return _sequence(items[0], optional, length=None, as_tuple=True)
    if origin is tuple and items and all(item == items[0] for item in items):
        return _sequence(items[0], optional, length=len(items), as_tuple=True)
    return None


def _base(hint: Any) -> Base | None:
    if typing.get_origin(hint) is typing.Literal:
        return literal_base(tuple(value for value in typing.get_args(hint) if value is not None))
    if not isinstance(hint, type):
        return None
    return BASES.get(hint) or (enum_base(hint) if issubclass(hint, Enum) else None)


def _is_class(hint: Any, base: type) -> bool:
    return isinstance(hint, type) and issubclass(hint, base)


class _UnfitError(Exception):
    """A structure that cannot be taken apart exactly, and what to write instead."""

    def __init__(self, mend: str) -> None:
        super().__init__(mend)
        self.mend = mend


def _structure(hint: Any, *, optional: bool) -> Kind | None:
    """The kind of a frozen dataclass, a named tuple, or a tuple of different types; None for all others."""
    hints = _parts(hint)
    if hints is None:
        return None
    name = hint.__name__ if isinstance(hint, type) else str(hint).replace("torch.Tensor", "Tensor")
    if optional:
        raise _UnfitError("take its parts as arguments of their own, each with `| None`")
    parts: dict[str, Kind] = {}
    for part, inside in hints.items():
        kind = kind_of(inside)
        if kind is None:
            raise _UnfitError(f"`{part}` of `{name}`: {mend_for(inside)}")
        if kind.is_tensor:
            raise _UnfitError(f"take the tensors of `{name}` as arguments of their own")
        parts[part] = kind
    exact: Any = tuple if typing.get_origin(hint) is tuple else hint
    structure = Structure(exact, parts, issubclass(exact, tuple))
    return Kind(Base(structure.hint(), "", structure.accepts), structure=structure)


def _parts(hint: Any) -> dict[str, Any] | None:
    """The hint of each part."""
    if _is_tuple(hint):
        items = typing.get_args(hint)
        if not items or Ellipsis in items:
            return None
        return {str(position): item for position, item in enumerate(items)}
    if not isinstance(hint, type):
        return None
    if issubclass(hint, tuple) and hasattr(hint, "_fields"):
        names, hints = list(inspect.signature(hint).parameters), _resolved(hint)
        if set(hints) != set(names):
            untyped = f"give every field of `{hint.__name__}` a type hint: derive it from `NamedTuple`"
            raise _UnfitError(untyped)
        return {name: hints[name] for name in names}
    if not dataclasses.is_dataclass(hint):
        return None
    if not hint.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # every dataclass has them
        raise _UnfitError(f"write `@dataclass(frozen=True)` over `{hint.__name__}`")
    fields = dataclasses.fields(hint)
    if {each.name for each in fields if each.init} != set(inspect.signature(hint).parameters) or not all(
        each.init for each in fields
    ):
        raise _UnfitError(f"let the arguments of `{hint.__name__}` be its fields, and nothing else")
    hints = _resolved(hint)
    return {each.name: hints[each.name] for each in fields}


def _resolved(hint: type) -> dict[str, Any]:
    """The hints of a class, as types."""
    try:
        return typing.get_type_hints(hint)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise _UnfitError(
            f"let the type hints of `{hint.__name__}` name what its module has: {error}"
        ) from error


def _sequence(item: Any, optional: bool, *, length: int | None, as_tuple: bool) -> Kind | None:
    item_optional, members = _split_union(item)
    base = _base(members[0]) if len(members) == 1 else None
    if base is None or (item_optional and base is not TENSOR) or (length is not None and base is TENSOR):
        return None
    return Kind(base, optional, True, length, item_optional, False, as_tuple)


def _is_tuple(hint: Any) -> bool:
    origin: Any = typing.get_origin(hint)
    return origin is tuple


def _spread(members: list[Any], optional: bool) -> Kind | None:
    """`int | tuple[int, int]` and the same of floats, in either order."""
    single, several = sorted(members, key=_is_tuple)
    kind = _single(several, optional)
    if (
        kind is None
        or kind.length is None
        or kind.base not in (INT, FLOAT)
        or BASES.get(single) is not kind.base
    ):
        return None
    return Kind(kind.base, optional, True, kind.length, False, True, True)


def shown_hint(hint: Any) -> str:
    """A type hint in a message."""
    if hint is types.NoneType:
        return "None"
    if isinstance(hint, type):
        return hint.__name__
    return str(hint).replace("torch.Tensor", "Tensor").replace("typing.", "")
