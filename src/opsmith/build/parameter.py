"""A parameter of a kernel in C++ or CUDA C++: what it takes, and how its author writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

FORMS = ("Tensor", "int", "float", "bool", "str", "Tensor[]", "int[]", "float[]", "bool[]")
"""The forms of a parameter, in the order of both headers, in torch's schema language."""
LAYOUTS = ("any", "contiguous", "channels-last")

_VIEWS = dict(zip(LAYOUTS, ("View", "Contiguous", "ChannelsLast"), strict=True))
_TYPES = {"int": "int64_t", "float": "double", "bool": "bool", "str": "std::string_view"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a parameter of a kernel takes.

    Attributes:
        form: One of `FORMS`.
        optional: Whether it takes None.
        written: Whether it is a view of a tensor that the kernel writes.
        dtype: That of a tensor; None for anything else.
        dim: How many dimensions a tensor has; None for any number, and for anything else.
        layout: One of `LAYOUTS`.
    """

    OPTIONAL: ClassVar[str] = "std::optional"

    form: str
    optional: bool = False
    written: bool = False
    dtype: torch.dtype | None = None
    dim: int | None = None
    layout: str = "any"

    def __str__(self) -> str:
        """As its author would write it in C++.

        Example:
            >>> str(Parameter("Tensor[]", dtype=torch.float32, dim=2))
            'List<View<const float32, 2>>'
        """
        item = self.form.removesuffix("[]")
        text = self._view() if item == "Tensor" else self.number(item)
        if self.form.endswith("[]"):
            text = f"List<{text}{self.capacity()}>"
        return f"{self.OPTIONAL}<{text}>" if self.optional else text

    def serves(self, wanted: Parameter) -> bool:
        """Whether it takes what is wanted, whatever it says of dtype, dimensions and layout."""
        mine = (self.form, self.written, self.optional)
        return mine == (wanted.form, wanted.written, wanted.optional)

    def holds(self, dtype: torch.dtype, dim: int) -> bool:
        """Whether a tensor of this dtype and so many dimensions can be seen through it."""
        return dtype == self.dtype and self.dim in (None, dim)

    def number(self, item: str) -> str:
        """How a number, truth value or text of a form is written."""
        return _TYPES[item]

    def capacity(self) -> str:
        """How a list says for how many values it has room."""
        return ""

    def _view(self) -> str:
        dtype = "T" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        dim = "" if self.dim is None else f", {self.dim}"
        return f"{_VIEWS[self.layout]}<{'' if self.written else 'const '}{dtype}{dim}>"
