"""Faults of a kernel that the emulation cannot detect with the current compiler."""

from __future__ import annotations

import re

from opsmith.kernels.cpp.compiler import kernel_toolchain
from opsmith.kernels.cuda.emulation.compiler import is_clang
from opsmith.kernels.cuda.emulation.host_headers import kernel_texts
from opsmith.kernels.cuda.source import CudaSource

_TYPE = r"[\w:]+(?:\s*<[^<>;]*>)?(?:\s+[\w:]+)*\s*\*[\s*]*"
_POINTER_CAST = re.compile(rf"reinterpret_cast|_cast\s*<\s*{_TYPE}>|\(\s*{_TYPE}\)\s*[\w(&*]")
"""Cast to a pointer; a kernel without such a cast has no misaligned address."""
_COPIES = (
    "clang does not show whether a whole struct, such as a `float4`, is copied at a misaligned address: "
    "name g++ in CXX"
)


def unseen_faults(source: CudaSource) -> str | None:
    """Return the undetectable faults in a kernel, with a remedy; None if all faults can be detected.

    clang checks the alignment of numbers and members, but not the alignment of structs that it copies whole.

    Args:
        source: The kernel.

    Raises:
        ToolchainError: If there is no compiler.
    """
    if is_clang(kernel_toolchain()) and any(map(_POINTER_CAST.search, kernel_texts(source))):
        return _COPIES
    return None
