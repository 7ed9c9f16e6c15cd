"""A compiled C++ kernel, loaded: what its parameters are."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.build.cpp.compiling import LIBRARY
from opsmith.build.parameter import FORMS, LAYOUTS, Parameter
from opsmith.core.bases import NUMBERED

VERSION = 3
"""Of what a library exports; a test holds it to the header's."""


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
                hint="see that every library it needs is installed, and that CXX is this machine's compiler",
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
