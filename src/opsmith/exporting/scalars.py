"""Numbers that torch's exporter rounds on their way into a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opsmith.exporting.packages import onnx, onnxscript


def exact_scalars(opset: int) -> dict[Any, Callable[..., Any]]:
    """What torch's exporter is told of its own `scalar_tensor`, which writes a float64 in single precision.

    It is what the number in `0.3 * x` becomes.

    Args:
        opset: Version of ONNX's operators.
    """
    from onnxscript.function_libs.torch_lib.ops import core  # a thousand translations: not before an export

    operators = onnxscript.values.Opset("", opset)

    def scalar_tensor(s: Any, **options: Any) -> Any:
        if isinstance(s, float) and options.get("dtype") == onnx.TensorProto.DOUBLE:
            return operators.Constant(value=onnx.helper.make_tensor("", onnx.TensorProto.DOUBLE, [], [s]))
        return core.aten_scalar_tensor(s, **options)

    return {torch.ops.aten.scalar_tensor.default: scalar_tensor}
