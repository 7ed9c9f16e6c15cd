"""Faults of a kernel that the compiler in use does not let the emulation see."""

from __future__ import annotations

import re

from opsmith.kernels.cpp.compiler import kernel_toolchain
from opsmith.kernels.cuda.emulation.compiler import is_clang
from opsmith.kernels.cuda.emulation.host_headers import kernel_texts
from opsmith.kernels.cuda.source import CudaSource

_TYPE = r"[\w:]+(?:\s*<[^<>;]*>)?(?:\s+[\w:]+)*\s*\*[\s*]*"
_POINTER_CAST = re.compile(rf"reinterpret_cast|_cast\s*<\s*{_TYPE}>|\(\s*{_TYPE}\)\s*[\w(&*]")
"""Cast to a pointer: without one, a kernel has no misaligned address."""
_COPIES = (
    "clang does not show whether a whole struct, such as a `float4`, is copied at a misaligned address: "
    "name g++ in CXX"
)


def unseen_faults(source: CudaSource) -> str | None:
    """Return the faults that cannot be seen in a kernel, and the way out; None if all of them can.

    clang checks the alignment of numbers and of members, but not that of structs that it copies as a whole.

    Args:
        source: The kernel.

    Raises:
        ToolchainError: If there is no compiler.
    """
    if is_clang(kernel_toolchain()) and any(map(_POINTER_CAST.search, kernel_texts(source))):
        return _COPIES
    return None
