"""Export of models and operators to ONNX files, which are compared with PyTorch before they are written."""

from __future__ import annotations

from opsmith.exporting.export import export_onnx
from opsmith.exporting.report import Comparison, Export

__all__ = ["Comparison", "Export", "export_onnx"]
