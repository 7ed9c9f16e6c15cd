"""Contenders in turns: one each in every round, so that a machine which slows down slows all of them."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from opsmith.benchmarking.clock import Call, Clock
from opsmith.benchmarking.effort import Effort
from opsmith.benchmarking.spread import spread

MOST_CALLS = 10_000
AGAIN = 4
"""So many turns are taken at most for one in which no other program ran."""
STEADY = 0.02
"""No more rounds are run once the spread of each contender, by the root of their number, is below this."""


@dataclass(frozen=True)
class Contestant:
    """Something to time.

    Args:
        call: Makes one call.
        prepare: Makes what each call uses up, such as a graph; what it returns is called in the place of
            `call`, and making it is not timed.
        room: How many of these there is memory for.
    """

    call: Call
    prepare: Callable[[], Call] | None = None
    room: int = MOST_CALLS

    def calls(self, count: int) -> list[Call]:
        """So many calls, ready to be timed."""
        return [self.call] * count if self.prepare is None else [self.prepare() for _ in range(count)]


@dataclass(frozen=True)
class Times:
    """What was measured of one contender.

    Args:
        calls: How many calls each turn made.
        seconds: For each round, how long a call took.
    """

    calls: int
    seconds: tuple[float, ...]


def in_turns(
    contestants: Mapping[str, Contestant], clock: Clock, effort: Effort, seed: int
) -> dict[str, Times]:
    """Time contenders against one another.

    Args:
        contestants: What to time; each has run before.
        clock: Measures them.
        effort: How often.
        seed: Seed of the order within rounds.

    Example:
        >>> from opsmith.benchmarking.clock import ProcessorClock
        >>> from opsmith.benchmarking.effort import EFFORTS
        >>> one = {"sum": Contestant(lambda: sum(range(99)))}
        >>> found = in_turns(one, ProcessorClock(), EFFORTS["quick"], 0)
        >>> len(found["sum"].seconds)
        7
    """
    order, draw = list(contestants), random.Random(seed)
    taken: dict[str, list[float]] = {name: [] for name in order}
    with _undisturbed():
        counts = {name: _count(each, clock, effort.turn_s) for name, each in contestants.items()}
        start = time.perf_counter()
        for number in range(effort.most):
            if number >= effort.least and (
                time.perf_counter() - start > effort.budget_s or all(map(_steady, taken.values()))
            ):
                break
            draw.shuffle(order)
            for name in order:
                taken[name].append(_turn(contestants[name], clock, counts[name]))
    return {name: Times(counts[name], tuple(taken[name])) for name in contestants}


def _turn(each: Contestant, clock: Clock, count: int) -> float:
    """Seconds of one call; one before them does not count, as the caches are another's.

    A turn in which the system let another program run in the place of this one says nothing of the call:
    there is another, and the least of some where all were so. A call that waits by itself is no such turn.
    """
    least = math.inf
    for _ in range(AGAIN):
        clock.settle()
        clock.seconds(each.calls(1))
        ready = each.calls(count)
        before = clock.interruptions()
        least = min(least, clock.seconds(ready) / count)
        if clock.interruptions() == before:
            break
    return least


def _count(each: Contestant, clock: Clock, turn_s: float) -> int:
    """How many calls fill a turn."""
    count = 1
    clock.settle()
    while True:
        taken = clock.seconds(each.calls(count))
        if taken >= turn_s or count >= min(MOST_CALLS, each.room):
            return count
        wanted = int(1.2 * count * turn_s / max(taken, 1e-9)) + 1
        count = min(max(wanted, count + 1), 10 * count, MOST_CALLS, each.room)


def _steady(seconds: list[float]) -> bool:
    return bool(spread(seconds).relative <= STEADY * len(seconds) ** 0.5)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A region in which no garbage is collected."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
