"""Library of a C++ kernel: the tables that it exports."""

from __future__ import annotations

import ctypes

from opsmith.kernels.common.parameters import Parameter
from opsmith.kernels.cpp.codegen import TABLE
from opsmith.kernels.runtime.loading import LibraryFile

VERSION = 6
"""Version of the structures that a library exports; a test compares it with the header's."""


_Parameter = ctypes.c_int32 * 6
"""Fields of a parameter: see `Parameter.of_numbers`."""


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
    ]


class CppLibrary:
    """Loaded library of a kernel.

    Args:
        file: The file.
        table: Name of the table to read: `TABLE`, or `OUT_TABLE`.

    Attributes:
        file: The file.
        exported: The exported table.
        candidates: Parameters of each instance of the kernel.
        instances: Address of each instance.
        computes_sizes: True if the library computes the sizes of the results.
        sized: Number of results whose sizes the author's `sizes` returns; None if there is no such function.
    """

    def __init__(self, file: LibraryFile, table: str = TABLE) -> None:
        # The library is never unloaded: another thread may run its code.
        self.file = file
        self.exported = _Exported.in_dll(ctypes.CDLL(file.path), table)
        first = self.exported.candidates[0]
        self.computes_sizes = bool(first.sizes)
        self.sized: int | None = None if first.sized < 0 else first.sized
        self.candidates = tuple(
            tuple(map(Parameter.of_numbers, each.parameters[: each.count]))
            for each in self.exported.candidates[: self.exported.count]
        )
        self.instances = tuple(map(ctypes.addressof, self.exported.candidates[: self.exported.count]))
