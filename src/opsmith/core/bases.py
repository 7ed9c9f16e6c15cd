"""What one value of an argument can be: how it is annotated, written in a schema, and recognised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Base:
    """One value, without optional or list around it.

    Args:
        annotation: As its author would annotate it.
        schema: Its type in torch's schema language.
        accepts: Whether a value is one.
        lower: Makes of a value what torch's dispatcher carries; None where it carries the value itself.
        lift: Makes of that the value again; leaves what it cannot read, which is then not accepted.
        members: The values that there are, where they can be counted.
        exact: The type of every value, where that alone says that it is one.
        hint: What to do about a value that is none.
        held: Whether what the dispatcher hands over may be no value, although the schema allows it.
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

    def default_text(self, value: Any) -> str:
        """A default value in the schema language."""
        if isinstance(value, Enum):
            return f'"{value.name}"'
        if self.schema == "complex":
            # Only imaginary numbers can be written; for others this is no schema, and declaring says so.
            return f"{value.imag!r}j" if value.real == 0 else repr(complex(value))
        if isinstance(value, str | torch.device):
            escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'
        if isinstance(value, bool | int | float):
            return repr(value)
        return str(value).removeprefix("torch.")  # dtype, layout, memory format


def is_int(value: Any) -> bool:
    """Whether it is a whole number, or stands for one."""
    return isinstance(value, int | torch.SymInt)


def _is_float(value: Any) -> bool:
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat)


TENSOR = Base("Tensor", "Tensor", lambda value: isinstance(value, torch.Tensor))
INT = Base("int", "SymInt", is_int)
FLOAT = Base("float", "float", _is_float)
BOOL = Base("bool", "bool", lambda value: isinstance(value, bool | torch.SymBool))
STR = Base("str", "str", lambda value: isinstance(value, str))
COMPLEX = Base("complex", "complex", lambda value: isinstance(value, int | float | complex))
NUMBER = Base("int | float", "Scalar", _is_float, held=True)


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
