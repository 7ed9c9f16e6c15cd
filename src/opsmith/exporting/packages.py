"""The packages of ONNX, with an error for missing packages."""

from __future__ import annotations

from opsmith import errors
from opsmith.extras import install

try:
    import onnx
    import onnx_ir
    import onnxscript
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, InlinePass
except ModuleNotFoundError as error:
    raise errors.MissingExtraError(
        "ONNX needs the packages `onnx`, `onnx_ir` and `onnxscript`",
        got=f"no module named {error.name!r}",
        hint=install("onnx"),
    ) from error
NO_RUNTIME = ""
"""Reason why ONNX Runtime is missing, which only a comparison needs; empty if it is installed."""
try:
    import onnxruntime
except ImportError as error:
    NO_RUNTIME = f"ONNX Runtime cannot be imported: {error}"

__all__ = [
    "NO_RUNTIME",
    "ClearMetadataAndDocStringPass",
    "InlinePass",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
]
