"""What makes a benchmark brief: next to no rounds, and a check that is taken for made."""

from __future__ import annotations

from typing import Any

import opsmith
from opsmith.benchmarking.effort import Effort
from opsmith.checking import Outcome, Report

BRIEF = Effort("quick", (64, 1024), 3, 3, 1e-5, 0.01, 60.0)


def passed(operator: opsmith.Operator[..., Any]) -> Report:
    """The report of a check that found nothing wrong."""
    outcomes = (Outcome("forward", "passed"), Outcome("gradient", "passed"))
    return Report(operator.name, outcomes, seed=0)
