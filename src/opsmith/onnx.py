"""ONNX files as modules of torch: `opsmith.onnx.load`."""

from __future__ import annotations

from opsmith.exporting.runtime import OnnxModule, load

__all__ = ["OnnxModule", "load"]
