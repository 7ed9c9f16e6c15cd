"""Reads and writes of a Triton kernel in the interpreter, held to the memory of its arguments.

The interpreter takes any pointer: a load without a mask would read what lies behind a tensor, and a store
would write there, and end the process sooner or later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

MEMORY = "_interpreter"
"""What Triton's interpreter calls its own access to memory."""


class OutsideError(Exception):
    """A kernel reads or writes memory that is none of its arguments'.

    Attributes:
        parameter: The parameter whose memory is nearest.
    """

    def __init__(self, way: str, parameter: str, place: str) -> None:
        self.parameter = parameter
        super().__init__(f"{way} outside of `{parameter}`: {place}")


@contextlib.contextmanager
def held_to(arguments: Mapping[str, Any]) -> Iterator[None]:
    """A region in which interpreted kernels use the memory of these tensors, or raise `OutsideError`."""
    from triton.runtime import interpreter

    real = vars(interpreter)[MEMORY]
    setattr(interpreter, MEMORY, _Held(real, arguments))
    try:
        yield
    finally:
        setattr(interpreter, MEMORY, real)


def outside(error: BaseException | None) -> OutsideError | None:
    """The use of other memory that an exception came from, if it did."""
    while error is not None and not isinstance(error, OutsideError):
        error = error.__cause__
    return error


class _Held:
    """The interpreter's access to memory, which is looked at first."""

    def __init__(self, real: Any, arguments: Mapping[str, Any]) -> None:
        self._real = real
        self._spans = [(name, *_span(each)) for name, each in arguments.items() if isinstance(each, Tensor)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._hold("reads", pointers, mask, other.dtype.itemsize)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._hold("writes", pointers, mask, value.dtype.itemsize)
        return self._real.store(pointers, value, mask)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        self._hold("writes", pointers, None, value.dtype.itemsize)
        return self._real.atomic_cas(pointers, expected, value, order)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._hold("writes", pointers, mask, value.dtype.itemsize)
        return self._real.atomic_rmw(operation, pointers, value, mask, order)

    def _hold(self, way: str, pointers: Any, mask: Any, size: int) -> None:
        import numpy

        used = numpy.asarray(pointers)
        if mask is not None:
            used = used[numpy.broadcast_to(numpy.asarray(mask) != 0, used.shape)]
        if not used.size:
            return
        low, high = int(used.min()), int(used.max()) + size
        if any(start <= low and high <= end for _, start, end in self._spans):
            return
        inside = numpy.zeros(used.shape, bool)
        for _, start, end in self._spans:
            if end - start >= size:
                inside |= (used >= start) & (used <= end - size)
        if not inside.all():
            raise self._told(way, int(used[~inside].ravel()[0]), size)

    def _told(self, way: str, address: int, size: int) -> OutsideError:
        def far(span: tuple[str, int, int]) -> int:
            return max(span[1] - address, address - span[2])

        name, start, end = min(self._spans, key=far)
        place = f"{start - address} bytes before it" if address < start else "just after its end"
        if address > end:
            place = f"{address - end} bytes after its end"
        return OutsideError(f"{way} {size} bytes", name, place)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where the memory of a tensor begins, and where it ends."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
