"""Memory that was never written: a region in which it holds what no run would compute by chance."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opsmith.build.cpp.dispatching import fill_new_memory
from opsmith.checking.outside import FILL, changed_settings, settings

COPIES = 4
"""Buffers of each size that are left to the allocators: a call may ask for several."""


@contextmanager
def poisoned() -> Iterator[None]:
    """A region in which all new memory is filled: with nan, or the largest whole number."""
    before, filled = settings(), fill_new_memory(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that have no deterministic algorithm
        torch.set_deterministic_debug_mode("warn")  # its longer name imports the compiler, for seconds
        setattr(torch.utils.deterministic, FILL, True)
        try:
            yield
        finally:
            changed_settings(before)
            fill_new_memory(filled)


def dirty(tensors: Iterable[Any], byte: int) -> None:
    """Leave used memory of the tensors' sizes to the allocators, NumPy's too, which torch cannot fill."""
    sizes = {
        (each.numel() * each.element_size(), each.device) for each in tensors if isinstance(each, Tensor)
    }
    for size, device in sizes:
        used = [torch.full((size,), byte, dtype=torch.uint8, device=device) for _ in range(COPIES)]
        del used
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            arrays = [numpy.full(size, byte, dtype="uint8") for _ in range(COPIES)]
            del arrays
