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
        least, most: Number of rounds: more than `least` only while the medians are unsteady.
        turn_s: Seconds of a turn: a shorter call is repeated.
        budget_s: Seconds of the whole benchmark: rounds end when their part of it is used up, but not before
            there are `timing.FEWEST`.
        rounds_s: Seconds that all rounds together get, however long a check and compilation take.
        slowest_s: Seconds of a call after which larger sizes are left out.
        grown_s: Expected seconds of a call from which on a size that is grown from a sample is made smaller.
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
    """Seconds that are left for the rounds of a benchmark, in equal parts for each direction of each case.

    What one does not need, as its times are steady early, the later ones get. Beside its rounds a case needs
    time for its arguments, compilation and memory: each that is left is expected to need what this one did.

    Args:
        effort: The effort, with the seconds of the whole benchmark and those of its rounds.
        cases: Number of cases.
        directions: Number of directions of a case.
        begun: Time by `time.perf_counter` at which the benchmark began.

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
            directions: Number of directions of its case that are left, with it.
        """
        now = time.perf_counter()
        beside = now - self._case_begun - self._rounds_of_case_s
        left = max(self._end - now - self._cases * beside, self._least_s - self.rounds_s, 0.0)
        return left / (directions + self._cases * self._directions)

    def spend(self, seconds: float) -> None:
        """Record the seconds of the rounds of a direction."""
        self._rounds_of_case_s += seconds
        self.rounds_s += seconds
