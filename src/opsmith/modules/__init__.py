"""Modules around operators, made by `op.module(...)`: `torch.nn.Module` classes that own the parameters."""

from __future__ import annotations

from opsmith.modules.operator_module import OperatorModule

__all__ = ["OperatorModule"]
