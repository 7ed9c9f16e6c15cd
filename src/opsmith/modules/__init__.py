"""Modules around operators: they own parameters, and the operators compute. `op.module(...)` makes them."""

from __future__ import annotations

from opsmith.modules.operator_module import OperatorModule

__all__ = ["OperatorModule"]
