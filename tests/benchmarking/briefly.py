"""Short benchmarks: few rounds, no check; and the contenders of a case."""

from __future__ import annotations

from typing import Any

import opsmith
from opsmith.benchmarking.effort import BenchmarkEffort
from opsmith.benchmarking.result import BenchmarkCase
from opsmith.checking import Outcome, Report

BRIEF = BenchmarkEffort("quick", (64, 1024), 3, 3, 1e-5, 0.01, 0.0, 60.0)


def passed(operator: opsmith.Operator[..., Any]) -> Report:
    """The report of a check that found nothing wrong."""
    outcomes = (Outcome("forward", "passed"), Outcome("gradient", "passed"))
    return Report(operator.name, outcomes, seed=0)


def left_out(case: BenchmarkCase) -> dict[str, str]:
    """Why contenders were not timed, by name."""
    return {each.name: each.left_out for each in case.contenders if each.left_out}


def timed(case: BenchmarkCase) -> set[tuple[str, str]]:
    """Contenders that were timed, with their directions."""
    return {(each.contender, each.direction) for each in case.timings}
