"""Library of a C++ kernel, loaded from the cache, and the table that it exports."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.build.cache import CacheEntry, cache_on_disk
from opsmith.core.argument_types import NUMBERED
from opsmith.kernels.common.parameters import PARAMETER_TYPES, Parameter
from opsmith.kernels.common.result_layout import LAYOUTS
from opsmith.kernels.cpp.compiler import LIBRARY

VERSION = 4
"""Version of the structures that a library exports; a test compares it with the header's."""


class _Parameter(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("type", "optional", "written", "dtype", "dim", "layout")]


class _Candidate(ctypes.Structure):
    _fields_ = [
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_int32),
        ("sized", ctypes.c_int32),
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


TABLE = "opsmith_kernel"
"""Name of the table that a kernel's library exports."""


class CppLibrary:
    """Loaded library of a kernel.

    Args:
        obtain: Returns the entry of the library; see `compile_kernel`.

    Attributes:
        exported: Table of what it exports.
        candidates: Parameters of each instance of the kernel.
        computes_sizes: True if it computes the sizes of the results.
        sized: Number of results whose sizes the author's `sizes` returns; None if there is no such function.
    """

    def __init__(self, obtain: Callable[[], CacheEntry]) -> None:
        # It is never unloaded: a call in another thread may be in its code.
        self.exported = _Exported.in_dll(ctypes.CDLL(loadable(obtain, TABLE)), TABLE)
        first = self.exported.candidates[0]
        self.computes_sizes = bool(first.sizes)
        self.sized: int | None = None if first.sized < 0 else first.sized
        self.candidates = tuple(
            tuple(map(_decode, each.parameters[: each.count]))
            for each in self.exported.candidates[: self.exported.count]
        )


def loadable(obtain: Callable[[], CacheEntry], exported: str) -> str:
    """Return the path of an entry's library; one from the cache that does not load is built again once.

    Args:
        obtain: Returns the entry.
        exported: Name that the library exports.

    Raises:
        CompileError: If a library that was built now does not load, or does not export that name.
    """
    entry = obtain()
    path = str(entry.directory / LIBRARY)
    try:
        getattr(ctypes.CDLL(path), exported)
    except (OSError, AttributeError) as error:
        if entry.source in ("disk", "built") and _runs_nothing(entry.directory):
            cache_on_disk().abandon("no program can be run from its file system (noexec)")
            return loadable(obtain, exported)
        if entry.source == "disk":
            cache_on_disk().discard(entry)
            return loadable(obtain, exported)
        absent = re.match(r"(\S+): cannot open shared object file", str(error))
        raise errors.CompileError(
            "the compiled kernel cannot be loaded",
            got=str(error),
            hint=f"give the path of `{absent[1]}` in `libraries=`, or put its folder into LD_LIBRARY_PATH"
            if absent
            else "see that every library it needs is installed, and that CXX is this machine's compiler",
        ) from error
    return path


def _runs_nothing(directory: Path) -> bool:
    """Return True for a file system that is mounted without the right to run programs from it."""
    return hasattr(os, "statvfs") and bool(os.statvfs(directory).f_flag & os.ST_NOEXEC)


def _decode(raw: Any) -> Parameter:
    return Parameter(
        PARAMETER_TYPES[raw.type],
        bool(raw.optional),
        bool(raw.written),
        None if raw.dtype < 0 else NUMBERED["ScalarType"][raw.dtype],
        None if raw.dim < 0 else raw.dim,
        LAYOUTS[raw.layout],
    )
