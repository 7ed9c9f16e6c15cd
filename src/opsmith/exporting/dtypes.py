"""Tensor dtypes of ONNX."""

from __future__ import annotations

import torch

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
"""Number of each dtype in `onnx.TensorProto`; other dtypes cannot be inputs or outputs."""

TYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in ONNX_TYPES)
"""Their names, for messages."""

DTYPE_BY_NUMBER = {number: dtype for dtype, _, number in _TYPES}
"""Each dtype, by its number in `onnx.TensorProto`."""

DTYPES = {name: dtype for dtype, name, _ in _TYPES}
"""Each dtype, by its name in ONNX's schemas and in ONNX Runtime."""
