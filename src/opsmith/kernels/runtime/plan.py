"""Plan with which the runtime computes a call: the work, the copies of arguments, the results."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from opsmith.core.argument_types import NUMBERED
from opsmith.core.call_arguments import tensors_in
from opsmith.torch_library.result_layouts import ResultLayout, has_layout

if TYPE_CHECKING:
    from opsmith.kernels.common.parameters import Parameter
    from opsmith.kernels.runtime.recipe import Recipe

_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(NUMBERED["ScalarType"])}
_CPU = torch.device("cpu")
_DEVICES = ("cpu", "cuda")
"""Types of devices, by torch's numbers."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of a kernel.

    Attributes:
        function: Handle of the kernel.
        grid: Number of blocks, in three dimensions.
        block: Number of threads of a block, in three dimensions.
        shared: Bytes of dynamic shared memory.
        parameters: Bytes of the parameters in their memory layout, without addresses.
        offsets: Offset of each parameter.
        addresses: Offset of each tensor's address, the index of the tensor among all arguments, results and
            scratch buffers, and the maximum number of dimensions of its view.
        given: Floating-point numbers of a call: offset, index of the argument, bytes, and index in a list or
            -1.
        failed: Text for the error if the driver refuses the launch: the kernel that is not launched.
        architecture: Architecture of the GPU, for this error.
    """

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    parameters: bytes
    offsets: tuple[int, ...]
    addresses: tuple[tuple[int, int, int], ...]
    given: tuple[tuple[int, int, int, int], ...]
    failed: str
    architecture: str

    def encode(self) -> list[int]:
        """Return the launch as numbers."""
        numbers = [self.function, *self.grid, *self.block, self.shared, *encode_bytes(self.parameters)]
        numbers += [*counted(self.offsets), *counted_all(self.addresses), *counted_all(self.given)]
        return [*numbers, *encode_bytes(self.failed.encode()), *encode_bytes(self.architecture.encode())]


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of a call, one after the other.

    Attributes:
        driver: The runtime's handle of the driver; 0 without a launch.
        context: Handle of torch's context of the GPU; 0 without a launch.
        scratch: Scratch buffers, each with the strides in which the kernel writes it.
        filled: Numbers that fill results and scratch buffers first, by the indices of these.
        launches: The launches; empty if there is nothing to write.
    """

    driver: int
    context: int
    scratch: tuple[tuple[ResultLayout, tuple[int, ...]], ...]
    filled: tuple[tuple[int, float], ...]
    launches: tuple[Launch, ...]

    def encode(self) -> list[int]:
        """Return the launches as numbers."""
        buffers = (_encode_layout(buffer, strides) for buffer, strides in self.scratch)
        filled = (encode_filled(index, number) for index, number in self.filled)
        launches = (each.encode() for each in self.launches)
        encoded = (number for parts in (buffers, filled, launches) for number in counted_all(parts))
        return [self.driver, self.context, *encoded]


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan for the calls of one signature.

    Attributes:
        work: Address of the instance in C++ that computes the results, or launches.
        copies: Tensors to copy into another layout first: index among the call's tensors, index of the
            argument, True if it is copied back, strides of the copy.
        results: Layout of each result, and the strides in which the kernel writes it if they differ.
        device: Device of the results.
        recipe: Recipe for calls of the same kind with other sizes; None if Python plans them.
    """

    work: int | Launches
    copies: tuple[tuple[int, int, bool, tuple[int, ...]], ...]
    results: tuple[tuple[ResultLayout, tuple[int, ...] | None], ...]
    device: torch.device = _CPU
    recipe: Recipe | None = None

    def encode(self) -> list[int]:
        """Return the plan as the numbers that `Plan::read` in plan.h expects."""
        instance, launches = (0, self.work.encode()) if isinstance(self.work, Launches) else (self.work, [])
        numbers = [instance, _DEVICES.index(self.device.type), self.device.index or 0]
        numbers += counted_all([*copied, *counted(strides)] for *copied, strides in self.copies)
        numbers += counted_all(
            [*_encode_layout(result, result.stride), *counted(written or ())]
            for result, written in self.results
        )
        return numbers + launches


def counted(numbers: Sequence[int]) -> list[int]:
    """Return the count of numbers and then the numbers, as `Numbers` in plan.h reads a list."""
    return [len(numbers), *numbers]


def counted_all(items: Iterable[Sequence[int]]) -> list[int]:
    """Return the count of structures, and then the numbers of each."""
    listed = list(items)
    return [len(listed), *(number for each in listed for number in each)]


def _encode_layout(made: ResultLayout, strides: Sequence[int]) -> list[int]:
    return [_DTYPE_NUMBERS[made.dtype], *counted(made.shape), *counted(strides)]


def encode_filled(index: int, number: float) -> list[int]:
    """Encode, as numbers, the number that fills the result or scratch buffer at an index."""
    whole = int(number) if isinstance(number, int) and int(float(number)) != number else None
    return [index, whole is not None, _bits(float(number)), whole or 0]


def encode_bytes(content: bytes) -> list[int]:
    """Return bytes as whole numbers, after their count."""
    count = -(-len(content) // 8)
    return [len(content), *struct.unpack(f"<{count}q", content.ljust(8 * count, b"\0"))]


def _bits(number: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)


def copies_in(
    values: Sequence[Any], parameters: Mapping[int, Parameter]
) -> tuple[tuple[int, int, bool, tuple[int, ...]], ...]:
    """Return the copies of a call's tensors into the layouts that a kernel takes; see `Plan`.

    Args:
        values: Argument values.
        parameters: Parameters of the arguments that may be copied, by the index of the argument.
    """
    copies, tensors = [], 0
    for index, value in enumerate(values):
        parameter = parameters.get(index)
        for tensor in tensors_in([value]):
            if parameter is not None and not has_layout(tensor, parameter.layout):
                strides = strides_in(tensor.shape, parameter.layout)
                copies.append((tensors, index, parameter.written, strides))
            tensors += 1
    return tuple(copies)


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
