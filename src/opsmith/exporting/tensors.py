"""The tensors in what a model takes and returns: found with their names, put back, resized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_TYPES = (
    (torch.float32, "tensor(float)", 1),
    (torch.uint8, "tensor(uint8)", 2),
    (torch.int8, "tensor(int8)", 3),
    (torch.uint16, "tensor(uint16)", 4),
    (torch.int16, "tensor(int16)", 5),
    (torch.int32, "tensor(int32)", 6),
    (torch.int64, "tensor(int64)", 7),
    (torch.bool, "tensor(bool)", 9),
    (torch.float16, "tensor(float16)", 10),
    (torch.float64, "tensor(double)", 11),
    (torch.uint32, "tensor(uint32)", 12),
    (torch.uint64, "tensor(uint64)", 13),
    (torch.bfloat16, "tensor(bfloat16)", 16),
)

ONNX_TYPES = {dtype: number for dtype, _, number in _TYPES}
"""Number of each dtype in `onnx.TensorProto`; what is not here cannot go through an input or output."""

TYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in ONNX_TYPES)
"""Their names, for messages."""

BY_NUMBER = {number: dtype for dtype, _, number in _TYPES}
"""Each dtype, by its number in `onnx.TensorProto`."""

DTYPES = {name: dtype for dtype, name, _ in _TYPES}
"""Each dtype, by what ONNX's schemas and ONNX Runtime call it."""


def leaves(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a value, with a name; what else it holds belongs to the model.

    Example:
        >>> [name for name, _ in leaves([torch.ones(1), {"a": torch.ones(1), "n": 2}], "x")]
        ['x_0', 'x_1_a']
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{name}_{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for position, each in enumerate(value):
            yield from leaves(each, f"{name}_{position}" if name else str(position))


def filled(value: Any, tensors: Iterator[Any]) -> Any:
    """The value with the tensors in it replaced, in the order of `leaves`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        items = {key: filled(each, tensors) for key, each in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        items_ = [filled(each, tensors) for each in value]
        return type(value)(*items_) if hasattr(value, "_fields") else type(value)(items_)
    return value


def resized(tensor: Tensor, axes: Mapping[int, int]) -> Tensor:
    """The tensor with other sizes along some axes: its rows again from the first, or fewer of them.

    Example:
        >>> resized(torch.tensor([1, 2, 3]), {0: 5})
        tensor([1, 2, 3, 1, 2])
    """
    for axis, size in axes.items():
        if tensor.shape[axis] != size:
            index = torch.arange(size, device=tensor.device) % tensor.shape[axis]
            tensor = tensor.index_select(axis, index)
    return tensor
