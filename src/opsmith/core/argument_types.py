"""Types of arguments: values, lists of them, and structures of several values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, Flag
from typing import Any

import torch

from opsmith import errors
from opsmith.core.location import where
from opsmith.core.lowering import UnknownObject, holds_tensor, object_of, token_of


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a single value, without `| None` or a list around it.

    Args:
        annotation: Its annotation in Python.
        schema: Its type in torch's schema language.
        accepts: Returns True for a value of this type.
        lower: Converts a value for torch's dispatcher; None if the dispatcher carries the value itself.
        lift: Inverse of `lower`; returns a value that it cannot convert unchanged, and `accepts` then rejects
            it. None if the reference takes the dispatcher's value.
        members: Names of all possible values, if they can be listed.
        exact: The Python type of every value, if it is enough to check that type.
        hint: The hint of an error about a value of the wrong type.
        held: True if the schema allows values of other types, so that the dispatcher's values are checked.
        values: The values that the type lists.
    """

    annotation: str
    schema: str
    accepts: Callable[[Any], bool]
    lower: Callable[[Any], Any] | None = None
    lift: Callable[[Any], Any] | None = None
    members: tuple[str, ...] = ()
    exact: type | None = None
    hint: str = ""
    held: bool = False
    values: tuple[Any, ...] = ()

    def default_text(self, value: Any) -> str:
        """Return a default value in the schema language."""
        if isinstance(value, Enum):
            return f'"{value.name}"'
        if self.schema == "complex":
            # The schema language has only imaginary numbers; torch refuses any other complex number.
            return f"{value.imag!r}j" if value.real == 0 else repr(complex(value))
        if isinstance(value, str | torch.device):
            escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'
        if isinstance(value, bool | int | float):
            return repr(value)
        return str(value).removeprefix("torch.")  # dtype, layout, memory format


# Numbers are converted before torch sees them: its dispatcher truncates tensors and NumPy's 2.5 to an int,
# and refuses other numbers that its functions take. torch.compile traces this; it sees NumPy's as arrays.
_INTS = int | torch.SymInt
_LARGEST_INT, _LARGEST_FLOAT = 2**63 - 1, int(sys.float_info.max)
_NUMBERS = int | float | torch.SymInt | torch.SymFloat


def _exceeds(number: Any, largest: int) -> bool:
    return isinstance(number, int) and not -largest - 1 <= number <= largest


def _conversion(types: Any, *, to_float: bool = False, symbolic: bool = False) -> Callable[[Any], Any]:
    """Return the conversion of a number, which refuses all other values.

    Args:
        types: The types that the schema takes.
        to_float: True if an integer becomes a float.
        symbolic: True if the schema takes numbers whose value torch does not know while it compiles.
    """

    def lower(value: Any) -> Any:
        of_numpy = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
        number = value.item() if of_numpy else value
        # As in Python, a NumPy bool is not an index.
        if not isinstance(number, types) or (of_numpy and types is _INTS and isinstance(number, bool)):
            raise TypeError(types)
        if torch.compiler.is_dynamo_compiling():
            if of_numpy:
                _refuse_unknown(number, symbolic)
        elif _exceeds(number, _LARGEST_FLOAT if to_float else _LARGEST_INT):
            raise TypeError(types)
        return float(number) if to_float and isinstance(number, int) else number

    return lower


def _refuse_unknown(number: Any, symbolic: bool) -> None:
    """Refuse a NumPy number in code that torch compiles, if torch does not know its value."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imported while torch compiles

    unknown = isinstance(number, bool) or torch.compiler.is_exporting()
    if unknown or not (symbolic or guard_or_false(number > 0) or guard_or_false(number <= 0)):
        raise ValueError(_UNKNOWN)


_UNKNOWN = """torch does not know the value of a NumPy number while it compiles
  expected: a Python number
  hint: convert it before compiled code runs, as `float(n)` does"""


def _takes(lower: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Return a function that is True for the values that a conversion takes."""

    def accepts(value: Any) -> bool:
        try:
            return lower(value) is not None
        except TypeError:
            return False

    return accepts


_as_int = _conversion(_INTS, symbolic=True)
_as_float = _conversion(_NUMBERS, to_float=True)
_as_complex = _conversion(_NUMBERS | complex)
_as_number = _conversion(_NUMBERS, symbolic=True)
_as_bool = _conversion(_NUMBERS | complex | torch.SymBool)


def is_no_utf_8(value: Any) -> bool:
    """Return True for a string that torch cannot store, such as a file name that Python could not decode.

    Example:
        >>> is_no_utf_8("\\ud800"), is_no_utf_8("é"), is_no_utf_8(1)
        (True, False, False)
    """
    if not isinstance(value, str) or torch.compiler.is_dynamo_compiling():
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


TENSOR = ValueType("Tensor", "Tensor", lambda value: isinstance(value, torch.Tensor))
INT = ValueType("int", "SymInt", _takes(_as_int), _as_int)
FLOAT = ValueType("float", "float", _takes(_as_float), _as_float)
BOOL = ValueType("bool", "bool", _takes(_conversion(bool | torch.SymBool)), _as_bool)
STR = ValueType("str", "str", lambda value: isinstance(value, str) and not is_no_utf_8(value))
COMPLEX = ValueType("complex", "complex", _takes(_as_complex), _as_complex)
NUMBER = ValueType("int | float", "Scalar", _takes(_as_number), _as_number, held=True)


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
"""Values in the order of torch's numbers, by type in the schema: in lists, torch 2.11 passes the numbers."""

VALUE_TYPES: dict[Any, ValueType] = {
    torch.Tensor: TENSOR,
    bool: BOOL,
    int: INT,
    float: FLOAT,
    str: STR,
    complex: COMPLEX,
    torch.dtype: ValueType("torch.dtype", "ScalarType", lambda value: isinstance(value, torch.dtype)),
    torch.device: ValueType("torch.device", "Device", lambda value: isinstance(value, torch.device | str)),
    torch.layout: ValueType("torch.layout", "Layout", lambda value: isinstance(value, torch.layout)),
    torch.memory_format: ValueType(
        "torch.memory_format", "MemoryFormat", lambda value: isinstance(value, torch.memory_format)
    ),
    torch.Generator: ValueType(
        "torch.Generator", "Generator", lambda value: isinstance(value, torch.Generator)
    ),
}


def enum_base(members: type[Enum]) -> ValueType | None:
    """Return the type for an enum, carried as the name of a member; None for flags."""
    if issubclass(members, Flag):
        return None

    def lower(value: Any) -> str:
        if not isinstance(value, members):
            raise TypeError(members)
        return value.name

    def lift(value: Any) -> Any:
        return members.__members__.get(value, value) if type(value) is str else value

    return ValueType(
        members.__name__,
        "str",
        lambda value: isinstance(value, members),
        lower,
        lift,
        tuple(members.__members__),
        members if len(members) else None,
        values=tuple(members),
    )


def literal_base(values: tuple[Any, ...]) -> ValueType | None:
    """Return the type for `Literal[...]` of strings or of ints; None for others."""
    types = {type(value) for value in values}
    if types not in ({str}, {int}):
        return None

    def accepts(value: Any) -> bool:
        return type(value) in types and value in values

    return ValueType(
        f"Literal[{', '.join(map(repr, values))}]",
        "str" if types == {str} else "int",
        accepts,
        None if types == {str} else _conversion(_INTS),
        held=True,
        values=values,
    )


OBJECT = ValueType(
    "object",
    "int",
    lambda value: not isinstance(value, UnknownObject) and not holds_tensor(value),
    token_of,
    object_of,
    hint="take tensors as separate arguments; call the operator by its handle: a number represents an object "
    "only in the process that made it",
)
"""Any object, carried as a number: a callable, a module, a dict, a nested tuple."""


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """The type of one argument, as its author wrote it.

    Args:
        base: Type of the value, or of a list's items.
        optional: True if it may be None.
        sequence: True for a list.
        length: Fixed length of the list, if it has one.
        item_optional: True if items of the list may be None.
        spread: True if one value stands for all items, as in `int | tuple[int, int]`.
        as_tuple: True if the reference receives a tuple rather than a list.
        structure: The parts of the value, if torch carries them one by one.
    """

    base: ValueType
    optional: bool = False
    sequence: bool = False
    length: int | None = None
    item_optional: bool = False
    spread: bool = False
    as_tuple: bool = False
    structure: Structure | None = None

    @property
    def is_tensor(self) -> bool:
        """True if it contains tensors, and so may have a gradient."""
        return self.base is TENSOR

    def schema(self) -> str:
        """Return the type in torch's schema language."""
        if not self.sequence:
            return self.base.schema + "?" * self.optional
        size = "" if self.length is None else str(self.length)
        return f"{self.base.schema}{'?' * self.item_optional}[{size}]{'?' * self.optional}"

    def annotation(self) -> str:
        """Return the annotation in Python."""
        if not self.sequence:
            text = self.base.annotation
        else:
            item = f"{self.base.annotation} | None" if self.item_optional else self.base.annotation
            if self.length is not None:
                text = f"tuple[{', '.join([item] * self.length)}]"
            else:
                text = f"tuple[{item}, ...]" if self.as_tuple else f"list[{item}]"
            if self.spread:
                text = f"{self.base.annotation} | {text}"
        return f"{text} | None" if self.optional else text

    def expected(self) -> str:
        """Return the annotation and the possible values, for messages."""
        return (
            f"{self.annotation()}: {', '.join(self.base.members)}" if self.base.members else self.annotation()
        )

    @property
    def encoded(self) -> bool:
        """True if torch's dispatcher carries a converted value."""
        return self.structure is not None or self.base.lift is not None

    def accepts(self, value: Any) -> bool:
        """Return True if a value is of this type."""
        if value is None:
            return self.optional
        if self.structure is not None:
            return self.structure.accepts(value)
        if not self.sequence:
            return self.base.accepts(value)
        items = self._items(value)
        if items is None or (self.length is not None and len(items) != self.length):
            return False
        return all(self.item_optional if item is None else self.base.accepts(item) for item in items)

    def converts(self, value: Any) -> bool:
        """Return True if calls take a value, perhaps by converting it, such as 1 for a bool."""
        try:
            self.lower(value)
        except TypeError:
            return False
        return self.base.lower is not None

    def is_exceeded(self, value: Any) -> bool:
        """Return True if an int in a value is larger than torch's dispatcher can carry for this type."""
        if self.base not in (INT, FLOAT, NUMBER):
            return False
        items = value if isinstance(value, list | tuple) else [value]
        return any(_exceeds(each, _LARGEST_FLOAT if self.base is FLOAT else _LARGEST_INT) for each in items)

    def default_text(self, value: Any) -> str:
        """Return a default value in the schema language."""
        if value is None:
            return "None"
        if self.sequence:
            return f"[{', '.join(self.base.default_text(item) for item in self._items(value))}]"
        return self.base.default_text(value)

    def restore(self, value: Any) -> Any:
        """Return a value from the dispatcher as the reference expects it: a spread value becomes a tuple."""
        if value is None:
            return value
        if not self.sequence:
            return self._lifted(value)
        items = self._items(value)
        if items is None:
            return value  # `accepts` refuses it
        value = [self._lifted(item) for item in items]
        numbered = NUMBERED.get(self.base.schema)
        if numbered is not None:
            value = [numbered[item] if isinstance(item, int) else item for item in value]
        return tuple(value) if self.as_tuple else list(value)

    def _items(self, value: Any) -> Any:
        """Return the items of a list, or of a single value that is spread; None for any other value."""
        if isinstance(value, list | tuple) or (type(value).__module__ == "numpy" and value.ndim):
            return value
        return [value] * (self.length or 1) if self.spread else None

    def _lifted(self, value: Any) -> Any:
        return value if self.base.lift is None or value is None else self.base.lift(value)

    def lower(self, value: Any) -> list[Any]:
        """Return the values that torch's dispatcher carries, one for each argument of the schema.

        Raises:
            TypeError: If the value is not of this type.
        """
        if self.structure is not None:
            return self.structure.lower(value)
        lower = self.base.lower
        if lower is None or value is None:
            return [value]
        if not self.sequence:
            return [lower(value)]
        items = self._items(value)
        if items is None or (self.length is not None and len(items) != self.length):
            raise TypeError(self)
        return [[None if item is None else lower(item) for item in items]]

    def flat(self, value: Any) -> list[Any]:
        """Return a list of the value, or of all its nested parts, unconverted."""
        if self.structure is None:
            return [value]
        pairs = zip(self.structure.parts.values(), self.structure.take_apart(value), strict=True)
        return [item for kind, part in pairs for item in kind.flat(part)]

    def lift(self, values: Iterator[Any]) -> Any:
        """Return the original value from the next items; inverse of `lower`."""
        return self.restore(next(values)) if self.structure is None else self.structure.lift(values)

    def leaves(self, name: str) -> list[tuple[str, ArgumentType]]:
        """Return the name and type of each schema argument that carries an argument of this name."""
        if self.structure is None:
            return [(name, self)]
        return [leaf for part, kind in self.structure.parts.items() for leaf in kind.leaves(f"{name}_{part}")]


@dataclass(frozen=True, slots=True)
class Structure:
    """A value of several parts: a frozen dataclass, a named tuple, or a tuple of different types.

    Args:
        type: The type of every value.
        parts: Type of each part, by name.
        by_position: True for a tuple.
    """

    type: type[Any]
    parts: dict[str, ArgumentType]
    by_position: bool

    def take_apart(self, value: Any) -> Sequence[Any]:
        """Return the parts of a value.

        Raises:
            TypeError: If the value does not have this structure.
        """
        # An instance of a derived class would become an instance of its base class.
        if type(value) is not self.type or (self.by_position and len(value) != len(self.parts)):
            raise TypeError(self.type)
        return list(value) if self.by_position else [getattr(value, name) for name in self.parts]

    def accepts(self, value: Any) -> bool:
        """Return True if a value has this structure, and its parts have their types."""
        return self.fault(value) is None

    def fault(self, value: Any) -> tuple[str, ArgumentType, Any] | None:
        """Return the first part with a wrong type: suffix of its name, expected type, value; else None."""
        try:
            parts = self.take_apart(value)
        except TypeError:
            return "", self._whole(), value
        for (name, kind), part in zip(self.parts.items(), parts, strict=True):
            behind = f"[{name}]" if self.type is tuple else f".{name}"
            if kind.structure is not None:
                inside = kind.structure.fault(part)
                if inside is not None:
                    return behind + inside[0], *inside[1:]
            elif not kind.accepts(part):
                return behind, kind, part
        return None

    def _whole(self) -> ArgumentType:
        return ArgumentType(ValueType(self.annotation(), "", lambda value: False), structure=self)

    def annotation(self) -> str:
        """Return the annotation in Python."""
        if self.type is not tuple:
            return self.type.__name__
        return f"tuple[{', '.join(kind.annotation() for kind in self.parts.values())}]"

    def lower(self, value: Any) -> list[Any]:
        """Return the values that torch's dispatcher carries for the parts."""
        lowered = []
        for kind, part in zip(self.parts.values(), self.take_apart(value), strict=True):
            lowered += kind.lower(part)
        return lowered

    def lift(self, values: Iterator[Any]) -> Any:
        """Return the original value; inverse of `lower`."""
        parts = [kind.lift(values) for kind in self.parts.values()]
        if self.type is tuple:
            return tuple(parts)
        value = self.type(**dict(zip(self.parts, parts, strict=True)))
        if hasattr(self.type, "__post_init__") and list(map(repr, self.take_apart(value))) != list(
            map(repr, parts)
        ):
            raise errors.ArgumentError(
                f"`{self.type.__name__}.__post_init__` changes fields that it has already computed",
                expected=", ".join(f"{name}={part!r}" for name, part in zip(self.parts, parts, strict=True)),
                got=repr(value),
                where=where(self.type.__post_init__),
                hint="let it keep a computed value unchanged, or compute the value in a property",
            )
        return value
