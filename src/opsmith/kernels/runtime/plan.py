"""Plan of a call, by which the runtime does it: the work, the copies of arguments, the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opsmith.core.argument_types import NUMBERED
from opsmith.torch_library.result_layouts import ResultLayout

_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(NUMBERED["ScalarType"])}


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan for the calls of one signature.

    Attributes:
        instance: Address of the instance that computes the results.
        copies: Tensors to copy into another layout first: index among the call's tensors, index of the
            argument, True if it is copied back, strides of the copy.
        results: Layout of each result, and the strides in which the kernel writes it where they differ.
    """

    instance: int
    copies: tuple[tuple[int, int, bool, tuple[int, ...]], ...]
    results: tuple[tuple[ResultLayout, tuple[int, ...] | None], ...]

    def encode(self) -> list[int]:
        """Return the plan as the numbers that `Plan::read` in plan.h expects."""
        numbers = [self.instance, len(self.copies)]
        for tensor, argument, back, strides in self.copies:
            numbers += [tensor, argument, back, len(strides), *strides]
        numbers.append(len(self.results))
        for result, written in self.results:
            numbers += [_DTYPE_NUMBERS[result.dtype], len(result.shape), written is not None]
            numbers += [*result.shape, *result.stride, *(written or ())]
        return numbers


def strides_in(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape in a layout.

    Example:
        >>> strides_in((2, 3), "contiguous")
        (3, 1)
    """
    if layout == "channels-last":
        order = [0, *range(2, len(shape)), 1]  # batch, spatial dimensions, channels
        inner = strides_in([shape[dim] for dim in order], "contiguous")
        return tuple(dict(zip(order, inner, strict=True))[dim] for dim in range(len(shape)))
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
