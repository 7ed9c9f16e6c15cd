"""The parameters of a launch in memory, as the header's structures lie there."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opsmith.build.cuda.parameters import CudaParameter


@dataclass(frozen=True, slots=True)
class Packing:
    """All of a launch's parameters but the addresses of its tensors.

    Attributes:
        image: The parameters, one after the other.
        offsets: Where each begins.
        addresses: Where the address of each tensor belongs, in order.
    """

    image: bytes
    offsets: tuple[int, ...]
    addresses: tuple[int, ...]

    def filled(self, addresses: Sequence[int]) -> bytearray:
        """The parameters, with the addresses of tensors.

        Args:
            addresses: One for each tensor, in order.
        """
        filled = bytearray(self.image)
        for offset, address in zip(self.addresses, addresses, strict=True):
            struct.pack_into("<Q", filled, offset, address)
        return filled


def pack(parameters: Sequence[CudaParameter], values: Sequence[Any]) -> Packing:
    """Lay out the values of a launch.

    Args:
        parameters: What each is.
        values: Arguments and results; tensors in the layouts that the kernel takes, without data.

    Example:
        >>> packing = pack([CudaParameter("int", item=4, size=4, alignment=4)], [7])
        >>> packing.image[:4], packing.offsets
        (b'\\x07\\x00\\x00\\x00', (0,))
    """
    image, offsets, addresses = bytearray(), [], []
    for parameter, value in zip(parameters, values, strict=True):
        image.extend(bytes(-len(image) % parameter.alignment))
        offsets.append(len(image))
        packed, inside = _parameter(parameter, value)
        assert len(packed) == parameter.size, (str(parameter), len(packed), parameter.size)
        addresses += [len(image) + offset for offset in inside]
        image += packed
    image.extend(bytes(8))  # never empty, so that it has an address
    return Packing(bytes(image), tuple(offsets), tuple(addresses))


def _parameter(parameter: CudaParameter, value: Any) -> tuple[bytes, list[int]]:
    """A parameter, and where in it addresses belong."""
    if not parameter.optional:
        return _given(parameter, value)
    if value is None:
        return bytes(parameter.size), []
    packed, addresses = _given(parameter, value)
    before = parameter.size - len(packed)  # whether it is given; the rest is room before what it holds
    return b"\x01".ljust(before, b"\0") + packed, [before + each for each in addresses]


def _given(parameter: CudaParameter, value: Any) -> tuple[bytes, list[int]]:
    if parameter.form == "Tensor":
        return _view(parameter, value), [0]
    if parameter.form == "Tensor[]":
        views = b"".join(_view(parameter, each) for each in value)
        places = [8 + at * parameter.view_size for at in range(len(value))]
        return struct.pack("<q", len(value)) + views.ljust(
            parameter.room * parameter.view_size, b"\0"
        ), places
    if parameter.form.endswith("[]"):
        items = struct.pack(f"<{len(value)}{parameter.item_format}", *value)
        room = -(-parameter.room * parameter.item // 8) * 8  # to the end that the count's alignment gives it
        return struct.pack("<q", len(value)) + items.ljust(room, b"\0"), []
    return struct.pack(f"<{parameter.item_format}", value), []


def _view(parameter: CudaParameter, tensor: Tensor) -> bytes:
    room = max(parameter.most_dim, 1)
    sizes, strides = ((*numbers, *(0,) * room)[:room] for numbers in (tensor.shape, tensor.stride()))
    return struct.pack(f"<Qqq{2 * room}q", 0, tensor.numel(), tensor.dim(), *sizes, *strides)
