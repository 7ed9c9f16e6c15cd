"""Modules that call operators, made by `op.module(...)`: `torch.nn.Module` classes with parameters."""

from __future__ import annotations

from opsmith.modules.operator_module import OperatorModule

__all__ = ["OperatorModule"]
