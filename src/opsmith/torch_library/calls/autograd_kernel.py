"""Kernels of operators for the autograd key, which receive calls of `torch.ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AutogradKernel:
    """Kernel of an operator for the autograd key.

    Args:
        compute: Function of the dispatch keys, the positional arguments and the keyword arguments.
        shown: Positions of the results that are returned to torch.

    Attributes:
        table: Table in C++ with which the accelerator makes known calls without `__call__`; None without it.
    """

    __slots__ = ("_compute", "shown", "table")

    def __init__(self, compute: Callable[..., Any], shown: tuple[int, ...]) -> None:
        self._compute, self.shown = compute, shown
        self.table: Any = None

    def __call__(self, keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Compute a call."""
        return self._compute(keyset, args, kwargs)
