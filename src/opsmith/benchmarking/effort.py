"""Levels of effort of a benchmark, and its budget of time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from types import MappingProxyType

from opsmith.core.effort_level import Level, effort_at


@dataclass(frozen=True)
class BenchmarkEffort:
    """Parameters of a level of effort.

    Args:
        name: `quick`, `default` or `thorough`.
        elements: Approximate number of elements of all inputs, for each size that is grown from a sample.
        least, most: Minimum and maximum number of rounds; there are more than `least` only while the medians
            are unsteady.
        turn_s: Seconds of a turn; a call that takes less time is repeated.
        budget_s: Seconds of the whole benchmark: rounds end when their share of it is used up, but not before
            `timing.FEWEST` rounds.
        rounds_s: Seconds for all rounds together, even if the check and compilation take long.
        slowest_s: If a call takes more seconds than this, larger sizes are left out.
        grown_s: If a call is expected to take more seconds than this, a size that was grown from a sample is
            made smaller.
    """

    name: Level
    elements: tuple[int, ...]
    least: int
    most: int
    turn_s: float
    budget_s: float
    rounds_s: float
    slowest_s: float
    grown_s: float = math.inf


EFFORTS = MappingProxyType(
    {
        "quick": BenchmarkEffort("quick", (1 << 16,), 7, 7, 0.002, 12.0, 3.0, 0.5),
        "default": BenchmarkEffort("default", (1 << 12, 1 << 20), 7, 31, 0.005, 18.0, 8.0, 2.0, 0.1),
        "thorough": BenchmarkEffort(
            "thorough",
            (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22),
            21,
            61,
            0.02,
            900.0,
            600.0,
            10.0,
        ),
    }
)


def effort_named(name: object) -> BenchmarkEffort:
    """Return the effort of a level.

    Raises:
        UsageError: If there is no such level.

    Example:
        >>> effort_named("quick").least
        7
    """
    return effort_at(name, EFFORTS, "benchmark")


class TimeBudget:
    """Remaining seconds for the rounds of a benchmark, in equal parts for each direction of each case.

    If the times of a direction are steady early, later directions get the remaining time. Apart from its
    rounds, a case needs time for its arguments, compilation and memory. Each remaining case is expected to
    need as much of it as the current case.

    Args:
        effort: The effort, with the seconds of the whole benchmark and of its rounds.
        cases: Number of cases.
        directions: Number of directions of a case.
        begun: Value of `time.perf_counter` when the benchmark began.

    Example:
        >>> budget = TimeBudget(EFFORTS["default"], 2, 3, time.perf_counter())
        >>> budget.begin_case()
        >>> 0 < budget.share(3) <= 3.0  # 18 seconds for six
        True
    """

    def __init__(self, effort: BenchmarkEffort, cases: int, directions: int, begun: float) -> None:
        self._end = begun + effort.budget_s
        self._least_s = effort.rounds_s
        self._cases = cases
        self._directions = directions
        self._case_begun = begun
        self._rounds_of_case_s = 0.0
        self.rounds_s = 0.0
        """Seconds of all rounds until now."""

    def begin_case(self) -> None:
        """Begin the next case."""
        self._cases -= 1
        self._case_begun = time.perf_counter()
        self._rounds_of_case_s = 0.0

    def share(self, directions: int) -> float:
        """Return the seconds for the rounds of the next direction.

        Args:
            directions: Number of remaining directions of its case, this one included.
        """
        now = time.perf_counter()
        beside = now - self._case_begun - self._rounds_of_case_s
        left = max(self._end - now - self._cases * beside, self._least_s - self.rounds_s, 0.0)
        return left / (directions + self._cases * self._directions)

    def spend(self, seconds: float) -> None:
        """Record the seconds of the rounds of a direction."""
        self._rounds_of_case_s += seconds
        self.rounds_s += seconds
