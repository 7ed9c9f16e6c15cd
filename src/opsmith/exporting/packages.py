"""The packages of ONNX, with a message for those that are not installed."""

from __future__ import annotations

from opsmith import errors
from opsmith.extras import install

try:
    import onnx
    import onnx_ir
    import onnxruntime
    import onnxscript
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, InlinePass
except ModuleNotFoundError as error:
    raise errors.MissingExtraError(
        "ONNX needs the packages `onnx`, `onnxscript` and `onnxruntime`",
        got=f"no module named {error.name!r}",
        hint=install("onnx"),
    ) from error

__all__ = ["ClearMetadataAndDocStringPass", "InlinePass", "onnx", "onnx_ir", "onnxruntime", "onnxscript"]
