"""The kinds of argument an operator can take: how each is annotated, written in a schema, and recognised."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch


@dataclass(frozen=True, slots=True)
class Base:
    """One value, without optional or list around it."""

    hint: str
    schema: str
    accepts: Callable[[Any], bool]

    def default_text(self, value: Any) -> str:
        """A default value in the schema language."""
        if self.schema == "complex":
            # Only imaginary numbers can be written; for others this is no schema, and declaring says so.
            return f"{value.imag!r}j" if value.real == 0 else repr(complex(value))
        if isinstance(value, str | torch.device):
            escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'
        if isinstance(value, bool | int | float):
            return repr(value)
        return str(value).removeprefix("torch.")  # dtype, layout, memory format


def _is_int(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt)


def _is_float(value: Any) -> bool:
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat)


TENSOR = Base("Tensor", "Tensor", lambda value: isinstance(value, torch.Tensor))
INT = Base("int", "SymInt", _is_int)
FLOAT = Base("float", "float", _is_float)
BOOL = Base("bool", "bool", lambda value: isinstance(value, bool | torch.SymBool))
STR = Base("str", "str", lambda value: isinstance(value, str))
COMPLEX = Base("complex", "complex", lambda value: isinstance(value, int | float | complex))
NUMBER = Base("int | float", "Scalar", _is_float)


def _numbered(names: str) -> tuple[Any, ...]:
    return tuple(getattr(torch, name, None) for name in names.split())


NUMBERED: dict[str, tuple[Any, ...]] = {
    "ScalarType": _numbered(
        "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool qint8 "
        "quint8 qint32 bfloat16 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 float8_e5m2 "
        "float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64 uint1 uint2 uint3 uint4 uint5 "
        "uint6 uint7 int1 int2 int3 int4 int5 int6 int7 float8_e8m0fnu float4_e2m1fn_x2"
    ),
    "Layout": _numbered("strided sparse_coo sparse_csr _mkldnn sparse_csc sparse_bsr sparse_bsc jagged"),
    "MemoryFormat": _numbered("contiguous_format preserve_format channels_last channels_last_3d"),
}
"""What torch counts, by type in the schema: in lists of these, torch 2.11 hands over numbers."""

BASES: dict[Any, Base] = {
    torch.Tensor: TENSOR,
    bool: BOOL,
    int: INT,
    float: FLOAT,
    str: STR,
    complex: COMPLEX,
    torch.dtype: Base("torch.dtype", "ScalarType", lambda value: isinstance(value, torch.dtype)),
    torch.device: Base("torch.device", "Device", lambda value: isinstance(value, torch.device | str)),
    torch.layout: Base("torch.layout", "Layout", lambda value: isinstance(value, torch.layout)),
    torch.memory_format: Base(
        "torch.memory_format", "MemoryFormat", lambda value: isinstance(value, torch.memory_format)
    ),
    torch.Generator: Base("torch.Generator", "Generator", lambda value: isinstance(value, torch.Generator)),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of one argument, as its author wrote it.

    Args:
        base: Type of a value, or of a list's items.
        optional: Whether `None` is taken.
        sequence: Whether it is a list.
        length: Fixed length of the list, if it has one.
        item_optional: Whether items of the list may be `None`.
        spread: Whether one value stands for all items, as in `int | tuple[int, int]`.
        as_tuple: Whether the reference receives a tuple rather than a list.
    """

    base: Base
    optional: bool = False
    sequence: bool = False
    length: int | None = None
    item_optional: bool = False
    spread: bool = False
    as_tuple: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether it holds tensors, and so may have a gradient."""
        return self.base is TENSOR

    def schema(self) -> str:
        """The type in torch's schema language."""
        if not self.sequence:
            return self.base.schema + "?" * self.optional
        # torch spreads a single number over `int[2]`, and not over `SymInt[2]`.
        item = "int" if self.spread and self.base is INT else self.base.schema
        size = "" if self.length is None else str(self.length)
        return f"{item}{'?' * self.item_optional}[{size}]{'?' * self.optional}"

    def hint(self) -> str:
        """The type as its author would annotate it."""
        if not self.sequence:
            text = self.base.hint
        else:
            item = f"{self.base.hint} | None" if self.item_optional else self.base.hint
            if self.length is not None:
                text = f"tuple[{', '.join([item] * self.length)}]"
            else:
                text = f"tuple[{item}, ...]" if self.as_tuple else f"list[{item}]"
            if self.spread:
                text = f"{self.base.hint} | {text}"
        return f"{text} | None" if self.optional else text

    def accepts(self, value: Any) -> bool:
        """Whether a value fits this type."""
        if value is None:
            return self.optional
        if not self.sequence:
            return self.base.accepts(value)
        if self.spread and self.base.accepts(value):
            return self.base is not FLOAT or not _is_int(value)  # torch spreads only what it need not convert
        if not isinstance(value, list | tuple | torch.Size):
            return False
        if self.length is not None and len(value) != self.length:
            return False
        return all(self.item_optional if item is None else self.base.accepts(item) for item in value)

    def default_text(self, value: Any) -> str:
        """A default value of this type in the schema language."""
        if value is None:
            return "None"
        if self.sequence and isinstance(value, list | tuple):
            return f"[{', '.join(self.base.default_text(item) for item in value)}]"
        return self.base.default_text(value)

    def restore(self, value: Any) -> Any:
        """A value from the dispatcher, in the form that the reference expects: a spread value is a tuple."""
        if not self.sequence or value is None:
            return value
        if self.spread and not isinstance(value, list | tuple):
            value = [value] * (self.length or 1)
        numbered = NUMBERED.get(self.base.schema)
        if numbered is not None:
            value = [numbered[item] if isinstance(item, int) else item for item in value]
        return tuple(value) if self.as_tuple else list(value)


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
        "annotate it as `str` or `int`, and test its value inside",
    ),
    (lambda hint: hint in (object, Any), "say which type it is, for example `Tensor` or `float`"),
    (lambda hint: hint is torch.nn.Module, "take its parameters as `Tensor` arguments"),
]


def mend_for(hint: Any) -> str:
    """What to write instead of an annotation that is not supported."""
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
        kind = _single(members[0], optional)
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
    if isinstance(hint, type) and hint in BASES:
        return Kind(BASES[hint], optional)
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, Sequence) and len(items) == 1:
        return _sequence(items[0], optional, length=None, as_tuple=False)
    if origin is tuple and len(items) == 2 and items[1] is Ellipsis:
        return _sequence(items[0], optional, length=None, as_tuple=True)
    if origin is tuple and items and all(item == items[0] for item in items):
        return _sequence(items[0], optional, length=len(items), as_tuple=True)
    return None


def _sequence(item: Any, optional: bool, *, length: int | None, as_tuple: bool) -> Kind | None:
    item_optional, members = _split_union(item)
    base = BASES.get(members[0]) if len(members) == 1 and isinstance(members[0], type) else None
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
