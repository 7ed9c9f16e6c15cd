"""ONNX: from a model or an operator to a file, compared with PyTorch before it is handed over."""

from __future__ import annotations

from opsmith.exporting.export import export_onnx
from opsmith.exporting.report import Comparison, Export

__all__ = ["Comparison", "Export", "export_onnx"]
