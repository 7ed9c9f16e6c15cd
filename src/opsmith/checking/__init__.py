"""Checks of operators: find out if an operator is right; if not, report the fault and its cause."""

from __future__ import annotations

from opsmith.checking.checker import check
from opsmith.checking.report import Failure, Outcome, Report

__all__ = ["Failure", "Outcome", "Report", "check"]
