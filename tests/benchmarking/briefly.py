"""What makes a benchmark brief, next to no rounds and a check that is taken for made; and who was in it."""

from __future__ import annotations

from typing import Any

import opsmith
from opsmith.benchmarking.effort import Effort
from opsmith.benchmarking.result import Case
from opsmith.checking import Outcome, Report

BRIEF = Effort("quick", (64, 1024), 3, 3, 1e-5, 0.01, 60.0)


def passed(operator: opsmith.Operator[..., Any]) -> Report:
    """The report of a check that found nothing wrong."""
    outcomes = (Outcome("forward", "passed"), Outcome("gradient", "passed"))
    return Report(operator.name, outcomes, seed=0)


def left_out(case: Case) -> dict[str, str]:
    """Why contenders were not timed, by name."""
    return {each.name: each.left_out for each in case.contenders if each.left_out}


def timed(case: Case) -> set[tuple[str, str]]:
    """Who was timed, in which directions."""
    return {(each.contender, each.direction) for each in case.timings}
