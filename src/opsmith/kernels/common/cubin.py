"""Attributes of kernels in cubins, which the compiler leaves for the driver."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from opsmith.build.elf import section

_SIZED = 4
"""Format of an attribute with a size and content; other formats have a 16-bit value instead of the size."""
_MAX_THREADS, _PARAMETER = 5, 0x17
"""EIATTR_MAX_THREADS and EIATTR_KPARAM_INFO in the output of `cuobjdump -elf`."""


def _contents(cubin: bytes, name: str, number: int) -> Iterator[bytes]:
    """Yield the content of each attribute with this number of a kernel."""
    attributes, at = section(cubin, f".nv.info.{name}"), 0
    while at < len(attributes):
        form, found, size = struct.unpack_from("<BBH", attributes, at)
        at += 4
        if form == _SIZED:
            if found == number:
                yield attributes[at : at + size]
            at += size


def launch_bound(cubin: bytes, name: str) -> int | None:
    """Return the maximum threads per block that a kernel's `__launch_bounds__` allows; None without it.

    Args:
        cubin: Content of the cubin.
        name: Name of the kernel in it.
    """
    for content in _contents(cubin, name, _MAX_THREADS):
        x, y, z = struct.unpack_from("<3I", content)
        return int(x * y * z)
    return None


def parameter_places(cubin: bytes, name: str) -> list[tuple[int, int]]:
    """Return offset and size in bytes of each parameter of a kernel, in order; empty if the cubin lacks them.

    Args:
        cubin: Content of the cubin.
        name: Name of the kernel in it.
    """
    found = {}
    for content in _contents(cubin, name, _PARAMETER):
        _, ordinal, offset, rest = struct.unpack("<IHHI", content)
        found[ordinal] = offset, rest >> 18  # the lower bits are the bank and the alignment
    return [found[ordinal] for ordinal in sorted(found)]
