"""The parameters of a CUDA kernel: what each takes, and how its value lies in memory."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from opsmith.core.bases import NUMBERED

FORMS = ("Tensor", "int", "float", "bool", "str", "Tensor[]", "int[]", "float[]", "bool[]")
"""The forms of a parameter, in the header's order, in torch's schema language."""
LAYOUTS = ("any", "contiguous", "channels-last")
MAX_DIM = 8
"""How many dimensions a view without a number has room for; a test holds it to the header's."""
TABLE = "opsmith_table_"
"""What the tables that the generated file holds are called, but for their numbers."""

_FIELDS = 10


@dataclass(frozen=True, slots=True)
class CudaParameter:
    """What a parameter of a CUDA kernel takes.

    Attributes:
        form: One of `FORMS`.
        optional: Whether it takes None.
        written: Whether it is a view of a tensor that the kernel writes.
        dtype: That of a tensor; None for anything else.
        dim: How many dimensions a tensor has; None for any number, and for anything else.
        layout: One of `LAYOUTS`.
        room: How many values a list takes.
        item: Bytes of a number.
        size: Bytes of the parameter.
        alignment: What its place among the parameters is a multiple of.
    """

    form: str
    optional: bool = False
    written: bool = False
    dtype: torch.dtype | None = None
    dim: int | None = None
    layout: str = "any"
    room: int = 0
    item: int = 0
    size: int = 0
    alignment: int = 1

    @property
    def most_dim(self) -> int:
        """How many dimensions a tensor may have."""
        return MAX_DIM if self.dim is None else self.dim

    @property
    def view_size(self) -> int:
        """Bytes of one view: pointer, elements, dimensions, and then sizes and strides."""
        return 24 + 16 * max(self.most_dim, 1)

    @property
    def item_format(self) -> str:
        """A number of it, as `struct` has it."""
        return {"int": {4: "i", 8: "q"}, "float": {4: "f", 8: "d"}, "bool": {1: "?"}}[
            self.form.removesuffix("[]")
        ][self.item]

    def __str__(self) -> str:
        """As its author would write it in C++."""
        plain = {"int": "int64_t", "float": "double", "bool": "bool"}
        item = self.form.removesuffix("[]")
        if item == "Tensor":
            view = {"any": "View", "contiguous": "Contiguous", "channels-last": "ChannelsLast"}[self.layout]
            dtype = "T" if self.dtype is None else str(self.dtype).removeprefix("torch.")
            dim = "" if self.dim is None else f", {self.dim}"
            text = f"{view}<{'' if self.written else 'const '}{dtype}{dim}>"
        else:
            text = {("int", 4): "int", ("float", 4): "float"}.get((item, self.item), plain[item])
        if self.form.endswith("[]"):
            text = f"List<{text}{f', {self.room}' if self.room else ''}>"
        return f"Optional<{text}>" if self.optional else text


def tables(ptx: str, count: int) -> tuple[tuple[CudaParameter, ...], ...]:
    """The parameters of each instance, which the compiler left in the PTX as numbers.

    Args:
        ptx: What was made of the file that describes a kernel.
        count: How many instances it has tables for.
    """
    found = {
        int(match["number"]): _ints(int(match["size"]), match["bytes"])
        for match in re.finditer(
            rf"\.b8 {TABLE}(?P<number>\d+)\[(?P<size>\d+)\] = \{{(?P<bytes>[\d, \n]*)\}}", ptx
        )
    }
    return tuple(tuple(_parameters(found[number])) for number in range(count))


def _ints(size: int, listed: str) -> tuple[int, ...]:
    values = bytes(int(each) for each in listed.split(",") if each.strip())
    return struct.unpack(f"<{size // 4}i", values.ljust(size, b"\0"))  # zeros at the end are left out


def _parameters(table: Sequence[int]) -> Iterator[CudaParameter]:
    for at in range(1, 1 + table[0] * _FIELDS, _FIELDS):
        form, optional, written, dtype, dim, layout, room, item, size, alignment = table[at : at + _FIELDS]
        yield CudaParameter(
            FORMS[form],
            bool(optional),
            bool(written),
            None if dtype < 0 else NUMBERED["ScalarType"][dtype],
            None if dim < 0 else dim,
            LAYOUTS[layout],
            room,
            item,
            size,
            alignment,
        )
