"""The packages that an export needs beside torch; a message says how to install those that are missing."""

from __future__ import annotations

from opsmith import errors
from opsmith.extras import install

try:
    import onnx
    import onnx_ir
    import onnxruntime
    import onnxscript
except ModuleNotFoundError as error:
    raise errors.MissingExtraError(
        "ONNX needs the packages `onnx`, `onnxscript` and `onnxruntime`",
        got=f"no module named {error.name!r}",
        hint=install("onnx"),
    ) from error

__all__ = ["onnx", "onnx_ir", "onnxruntime", "onnxscript"]
