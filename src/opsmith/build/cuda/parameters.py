"""The parameters of a CUDA kernel: what each takes, and how its value lies in memory."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from opsmith.build.parameter import FORMS, LAYOUTS, Parameter
from opsmith.core.bases import NUMBERED

MAX_DIM = 8
"""How many dimensions a view without a number has room for; a test holds it to the header's."""
TABLE = "opsmith_table_"
"""What the tables that the generated file holds are called, but for their numbers."""

_FIELDS = 10


@dataclass(frozen=True, slots=True)
class CudaParameter(Parameter):
    """What a parameter of a CUDA kernel takes.

    Attributes:
        room: How many values a list takes.
        item: Bytes of a number.
        size: Bytes of the parameter.
        alignment: What its place among the parameters is a multiple of.
    """

    OPTIONAL: ClassVar[str] = "Optional"

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

    def holds(self, dtype: torch.dtype, dim: int) -> bool:
        """Whether a tensor of this dtype and so many dimensions can be seen through it, and has room."""
        return Parameter.holds(self, dtype, dim) and dim <= self.most_dim

    def number(self, item: str) -> str:
        """How a number or truth value is written; of 4 bytes as the forms are called."""
        return item if self.item == 4 else Parameter.number(self, item)

    def capacity(self) -> str:
        """How a list says for how many values it has room."""
        return f", {self.room}" if self.room else ""


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
