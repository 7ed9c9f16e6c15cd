"""One thread for work in small pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_thread() -> Iterator[None]:
    """A region, or as a decorator a function, in which torch computes with one thread of the CPU.

    Tensors of a few thousand elements gain nothing from a second thread. Where other programs keep it
    waiting, each operation waits with it: the network for the digits was seen to train ten times slower.

    Example:
        >>> import torch
        >>> with single_thread():
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
