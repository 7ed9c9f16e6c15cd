"""Tensor dtypes of ONNX."""

from __future__ import annotations

import torch

from opsmith.exporting.packages import onnx_ir

TYPE_NAMES = (
    "float32, uint8, int8, uint16, int16, int32, int64, bool, float16, float64, uint32, uint64, bfloat16"
)
"""Names of the dtypes of inputs and outputs, as in torch and in messages."""

_IN_ONNX = {
    name: {"float32": "float", "float64": "double"}.get(name, name) for name in TYPE_NAMES.split(", ")
}

ONNX_TYPES: dict[torch.dtype, int] = {
    getattr(torch, name): int(onnx_ir.DataType[onnx.upper()]) for name, onnx in _IN_ONNX.items()
}
"""Number of each dtype in `onnx.TensorProto`; other dtypes cannot be inputs or outputs."""

DTYPE_BY_NUMBER = {number: dtype for dtype, number in ONNX_TYPES.items()}
"""Each dtype, by its number in `onnx.TensorProto`."""

DTYPES: dict[str, torch.dtype] = {f"tensor({onnx})": getattr(torch, name) for name, onnx in _IN_ONNX.items()}
"""Each dtype, by its name in ONNX's schemas and in ONNX Runtime."""
