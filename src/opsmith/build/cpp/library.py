"""A compiled C++ kernel, loaded: what its parameters are, and an operator of the dispatcher that runs it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cpp.compiling import LIBRARY, runtime
from opsmith.core.bases import NUMBERED

NAMESPACE = "opsmith_kernels"
FORMS = ("Tensor", "int", "float", "bool", "str", "Tensor[]", "int[]", "float[]", "bool[]")
"""The forms of a parameter, in the header's order, in torch's schema language."""
LAYOUTS = ("any", "contiguous", "channels-last")
VERSION = 1
"""Of what a library exports; a test holds it to the header's."""
OPTIONAL = 100

_numbers = itertools.count()


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
    ]


class _Exported(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("candidates", ctypes.POINTER(_Candidate)),
        ("boxed", ctypes.c_void_p),
        ("run", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
    ]


class CppLibrary:
    """A loaded library.

    Args:
        directory: Holds it; see `compiled`.

    Attributes:
        candidates: The parameters of each instance of the kernel.
    """

    def __init__(self, directory: Path) -> None:
        self._library = ctypes.CDLL(str(directory / LIBRARY))
        self._exported = _Exported.in_dll(self._library, "opsmith_kernel")
        self.candidates = tuple(
            tuple(_parameter(each.parameters[at]) for at in range(each.count))
            for each in self._exported.candidates[: self._exported.count]
        )
        self._record: int | None = None
        self._defined: Any = None

    def register(self, arguments: Sequence[Parameter], results: int) -> Any:
        """Make an operator of the dispatcher that runs it, and return that.

        It takes the number of a candidate, then the arguments, then the results, which it fills.

        Args:
            arguments: What each argument of the operator is in torch's schema.
            results: How many results there are.
        """
        name = f"kernel_{next(_numbers)}"
        listed = [
            "int candidate",
            *(f"{_schema(each)} a{at}" for at, each in enumerate(arguments)),
            *(f"Tensor(r{at}!) r{at}" for at in range(results)),
        ]
        self._defined = torch.library.Library(NAMESPACE, "FRAGMENT")
        self._defined.define(f"{name}({', '.join(listed)}) -> ()")
        # It runs below autograd, on tensors whose gradients are somebody else's concern.
        self._defined.impl(name, torch.library.fallthrough_kernel, "Autograd")
        forms = [FORMS.index(each.form) + OPTIONAL * each.optional for each in arguments] + [0] * results
        self._record = _runtime().opsmith_register(
            ctypes.byref(self._exported),
            NAMESPACE.encode(),
            name.encode(),
            b"CPU",
            (ctypes.c_int32 * len(forms))(*forms),
            len(forms),
            _torch_version(),
        )
        if not self._record:
            raise errors.ToolchainError(
                "torch does not take the kernel",
                expected="a torch whose dispatcher takes kernels from C",
                got=f"torch {torch.__version__}",
                mend="give the kernel in Python on this torch",
            )
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    def remove(self) -> None:
        """Take it out of the dispatcher; the kernel goes before the schema, or torch would crash."""
        if self._record is not None:
            _runtime().opsmith_unregister(ctypes.c_void_p(self._record))
            self._record = self._defined = None  # which lets go of the schema


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


def _schema(parameter: Parameter) -> str:
    return parameter.form + "?" * parameter.optional


@cache
def _runtime() -> Any:
    library: Any = ctypes.CDLL(str(runtime().directory / LIBRARY))
    library.opsmith_register.restype = ctypes.c_void_p
    library.opsmith_register.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_int32),
        ctypes.c_int32,
        ctypes.c_uint64,
    ]
    library.opsmith_unregister.argtypes = [ctypes.c_void_p]
    library.opsmith_unregister.restype = None
    library.opsmith_version.restype = ctypes.c_int64
    return library


def _torch_version() -> int:
    """Torch's version as its C functions take it: a byte each for major, minor and patch, from the top."""
    major, minor, patch = (int(part) for part in torch.__version__.split("+")[0].split(".")[:3])
    return major << 56 | minor << 48 | patch << 40
