"""Copies of tensors between bytes that AddressSanitizer watches: whoever reads beyond a tensor is told of.

A tensor has the memory that its elements reach and no more, though it be a slice of a larger one, and it
begins as far behind a multiple of 64 bytes as it did: what counts on aligned memory goes wrong with it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FENCE = 1024
"""Bytes that are watched on either side."""
ALIGNED = 64
"""torch aligns what it allocates so."""


@dataclass(frozen=True)
class Span:
    """Where an argument or a result lies, and the memory around it that is its fence."""

    label: str
    start: int
    size: int
    fence: int = 0


def fenced(label: str, value: Tensor, sanitizer: Any) -> tuple[Tensor, Span | None]:
    """A copy with fences, and where it lies; no fences around what has no elements, whose address is null.

    Args:
        label: Name of the argument.
        value: Any strides.
        sanitizer: The library of AddressSanitizer.
    """
    if not value.numel():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype), None
    size = value.element_size()
    extent: int = 1 + sum((n - 1) * int(step) for n, step in zip(value.shape, value.stride(), strict=True))
    lead = FENCE // size + int(value.storage_offset()) % (ALIGNED // size)
    block = torch.empty(lead + extent + FENCE // size, dtype=value.dtype)
    block.as_strided((extent,), (1,), lead).copy_(value.as_strided((extent,), (1,), value.storage_offset()))
    begin = block.data_ptr()
    start, end, stop = begin + lead * size, begin + (lead + extent) * size, begin + block.numel() * size
    for first, last in ((begin, start), (end, stop)):
        sanitizer.__asan_poison_memory_region(ctypes.c_void_p(first), ctypes.c_size_t(last - first))
    copy = block.as_strided(value.shape, value.stride(), lead)
    return copy, Span(label, start, extent * size, FENCE)
