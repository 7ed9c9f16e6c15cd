"""Checks of operators: is it right, and if not, what is wrong, where, and why?"""

from __future__ import annotations

from opsmith.checking.checker import check
from opsmith.checking.report import Failure, Outcome, Report

__all__ = ["Failure", "Outcome", "Report", "check"]
