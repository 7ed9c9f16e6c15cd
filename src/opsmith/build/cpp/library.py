"""A compiled C++ kernel, loaded: what its parameters are."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cpp.compiling import LIBRARY
from opsmith.core.bases import NUMBERED

FORMS = ("Tensor", "int", "float", "bool", "str", "Tensor[]", "int[]", "float[]", "bool[]")
"""The forms of a parameter, in the header's order, in torch's schema language."""
LAYOUTS = ("any", "contiguous", "channels-last")
VERSION = 3
"""Of what a library exports; a test holds it to the header's."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a parameter of a C++ kernel takes.

    Attributes:
        form: One of `FORMS`.
        optional: Whether it takes None.
        written: Whether it is a view of a tensor that the kernel writes.
        dtype: That of a tensor; None for anything else.
        dim: How many dimensions a tensor has; None for any number, and for anything else.
        layout: One of `LAYOUTS`.
    """

    form: str
    optional: bool = False
    written: bool = False
    dtype: torch.dtype | None = None
    dim: int | None = None
    layout: str = "any"

    def __str__(self) -> str:
        """As its author would write it in C++."""
        plain = {"int": "int64_t", "float": "double", "bool": "bool", "str": "std::string_view"}
        item = self.form.removesuffix("[]")
        if item == "Tensor":
            view = {"any": "View", "contiguous": "Contiguous", "channels-last": "ChannelsLast"}[self.layout]
            dtype = "T" if self.dtype is None else str(self.dtype).removeprefix("torch.")
            dim = "" if self.dim is None else f", {self.dim}"
            text = f"{view}<{'' if self.written else 'const '}{dtype}{dim}>"
        else:
            text = plain[item]
        if self.form.endswith("[]"):
            text = f"List<{text}>"
        return f"std::optional<{text}>" if self.optional else text


class _Parameter(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("form", "optional", "written", "dtype", "dim", "layout")]


class _Candidate(ctypes.Structure):
    _fields_ = [
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_int32),
        ("run", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
    ]


class _Exported(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("candidates", ctypes.POINTER(_Candidate)),
        ("entries", ctypes.c_void_p * 2),
        ("run", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
    ]


class CppLibrary:
    """A loaded library.

    Args:
        directory: Holds it; see `compiled`.

    Attributes:
        candidates: The parameters of each instance of the kernel.
        tells_sizes: Whether it tells the sizes of the results.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(directory / LIBRARY))
        except OSError as error:
            raise errors.CompileError(
                "the compiled kernel cannot be loaded",
                got=str(error),
                mend="see that every library it needs is installed, and that CXX is this machine's compiler",
            ) from error
        self.exported = _Exported.in_dll(self._library, "opsmith_kernel")
        self.tells_sizes = bool(self.exported.candidates[0].sizes)
        self.candidates = tuple(
            tuple(_parameter(each.parameters[at]) for at in range(each.count))
            for each in self.exported.candidates[: self.exported.count]
        )


def _parameter(raw: Any) -> Parameter:
    numbered = NUMBERED["ScalarType"]
    return Parameter(
        FORMS[raw.form],
        bool(raw.optional),
        bool(raw.written),
        None if raw.dtype < 0 else numbered[raw.dtype],
        None if raw.dim < 0 else raw.dim,
        LAYOUTS[raw.layout],
    )
