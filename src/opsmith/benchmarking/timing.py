"""Timing: clocks, statistics of times, levels of effort, and contenders that take turns."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

import torch

from opsmith import errors
from opsmith.checking.side_effects.global_settings import without_garbage_collection
from opsmith.core.call_arguments import shown
from opsmith.core.dataclass import dataclass

try:
    import resource
except ModuleNotFoundError:  # on Windows
    resource = None  # type: ignore[assignment]

Call = Callable[[], Any]

PAUSE_S = 0.02
"""Pause before each turn: threads of the previous call spin for this long, and would slow down the next."""


class Clock(Protocol):
    """Clock for calls on one device."""

    def seconds(self, calls: list[Call]) -> float:
        """Time the calls, one after the other."""
        ...

    def interruptions(self) -> int:
        """Return the number of times that the system preempted the calling thread."""
        ...

    def settle(self) -> None:
        """Wait for the end of all work that was started before."""
        ...


class ProcessorClock:
    """Wall time of the calling thread, for calls that block.

    Example:
        >>> 0 <= ProcessorClock().seconds([lambda: None]) < 1
        True
    """

    def seconds(self, calls: list[Call]) -> float:
        """Time the calls, one after the other."""
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start

    def interruptions(self) -> int:
        """Return the number of involuntary context switches; 0 if the system does not count them."""
        thread = getattr(resource, "RUSAGE_THREAD", None)  # on Linux
        return 0 if thread is None else resource.getrusage(thread).ru_nivcsw

    def settle(self) -> None:
        """Wait until the threads of the previous call sleep."""
        if torch.get_num_threads() > 1:
            time.sleep(PAUSE_S)


class CudaClock:
    """Time on a GPU, between two events in the stream of the calls.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, calls: list[Call]) -> float:
        """Time the GPU from the start of the first call to the end of the last."""
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
            milliseconds: float = start.elapsed_time(end)
            return milliseconds * 1e-3

    def interruptions(self) -> int:
        """Return 0: preemption of the host does not stop the GPU."""
        return 0

    def settle(self) -> None:
        """Wait for all queued work."""
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else ProcessorClock()


SURE = 0.95
"""Confidence level of an interval, if there are enough numbers."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some times.

    Args:
        median: The median.
        low, high: The quartiles: half of the times lie between.
        least: The smallest time.
        count: Number of times.
    """

    median: float
    low: float
    high: float
    least: float
    count: int

    @property
    def relative(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def spread(numbers: Sequence[float]) -> Spread:
    """Return the median and the quartiles of some numbers.

    Example:
        >>> spread([3.0, 1.0, 2.0, 100.0, 2.5])
        Spread(median=2.5, low=2.0, high=3.0, least=1.0, count=5)
    """
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0], numbers[0], 1)
    low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(median, low, high, min(numbers), len(numbers))


@dataclass(frozen=True)
class Ratio:
    """Ratio of times, with its confidence interval.

    Args:
        median: Median of the ratios within each round.
        low, high: Confidence interval of the median.
        sure: Confidence level of the interval.
    """

    median: float
    low: float
    high: float
    sure: float


def ratio(numbers: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return the median ratio of two series, round by round: a slow round slows both, and cancels.

    Args:
        numbers: Numerators, one for each round.
        others: Denominators.

    Example:
        >>> ratio([2.0, 20.0, 2.2, 1.8, 2.1, 1.9], [1.0, 10.0, 1.0, 1.0, 1.0, 1.0])
        Ratio(median=2.0, low=1.8, high=2.2, sure=0.96875)
    """
    ratios = sorted(one / other for one, other in zip(numbers, others, strict=True))
    skipped, sure = _skipped(len(ratios))
    return Ratio(statistics.median(ratios), ratios[skipped], ratios[-1 - skipped], sure)


def _skipped(count: int) -> tuple[int, float]:
    """Return the number of ratios outside the interval at each end, and its confidence."""
    outside, skipped = 2 * 0.5**count, 0
    for k in range(1, (count + 1) // 2):
        more = outside + 2 * math.comb(count, k) * 0.5**count
        if more > 1 - SURE:
            break
        outside, skipped = more, k
    return skipped, 1 - outside


Level = Literal["quick", "default", "thorough"]


@dataclass(frozen=True)
class BenchmarkEffort:
    """Parameters of a level of effort.

    Args:
        name: `quick`, `default` or `thorough`.
        elements: Approximate number of elements of all inputs, for each size that is grown from a sample.
        least, most: Number of rounds: more than `least` only while the medians are unsteady.
        turn_s: Seconds of a turn: a shorter call is repeated.
        budget_s: Seconds for all rounds, of every size, dtype and direction together; each has `least` rounds
            at any rate.
        slowest_s: Seconds of a call after which larger sizes are left out.
    """

    name: Level
    elements: tuple[int, ...]
    least: int
    most: int
    turn_s: float
    budget_s: float
    slowest_s: float


EFFORTS = MappingProxyType(
    {
        "quick": BenchmarkEffort("quick", (1 << 16,), 7, 7, 0.002, 3.0, 0.5),
        "default": BenchmarkEffort("default", (1 << 12, 1 << 20), 7, 31, 0.005, 8.0, 2.0),
        "thorough": BenchmarkEffort(
            "thorough", (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22), 21, 61, 0.02, 600.0, 10.0
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
    if isinstance(name, str) and name in EFFORTS:
        return EFFORTS[name]
    raise errors.UsageError(
        "there is no such level of effort",
        argument="effort",
        expected=", ".join(f"`{each}`" for each in get_args(Level)),
        got=shown(name),
        hint='take one of them, as in `opsmith.benchmark(operator, effort="thorough")`',
    )


MOST_CALLS = 10_000
MAX_ATTEMPTS = 4
"""Most attempts at a turn without preemption."""
STEADY = 0.02
"""Rounds end once the spread of each contender, divided by the root of their number, is below this."""


@dataclass(frozen=True)
class TimedCall:
    """A call to time.

    Args:
        call: Makes one call.
        prepare: Returns the function to time in place of `call`, for a call that consumes its preparation,
            as a backward its graph. The preparation is not timed.
        room: Number of preparations that fit into memory.
    """

    call: Call
    prepare: Callable[[], Call] | None = None
    room: int = MOST_CALLS

    def calls(self, count: int) -> list[Call]:
        """Prepare calls for the clock."""
        return [self.call] * count if self.prepare is None else [self.prepare() for _ in range(count)]


@dataclass(frozen=True)
class RoundTimes:
    """Times of one contender.

    Args:
        calls: Number of calls in each turn.
        seconds: Seconds of a call, for each round.
    """

    calls: int
    seconds: tuple[float, ...]


def time_in_turns(
    contenders: Mapping[str, TimedCall], clock: Clock, effort: BenchmarkEffort, seed: int
) -> dict[str, RoundTimes]:
    """Time contenders in turns: one each in every round, so that a slowdown of the machine slows all.

    Args:
        contenders: The calls to time; each has run before.
        clock: The clock of their device.
        effort: Number of rounds and length of turns.
        seed: Seed of the order within rounds.

    Example:
        >>> from opsmith.benchmarking.timing import ProcessorClock
        >>> from opsmith.benchmarking.timing import EFFORTS
        >>> one = {"sum": TimedCall(lambda: sum(range(99)))}
        >>> found = time_in_turns(one, ProcessorClock(), EFFORTS["quick"], 0)
        >>> len(found["sum"].seconds)
        7
    """
    order, draw = list(contenders), random.Random(seed)
    taken: dict[str, list[float]] = {name: [] for name in order}
    with without_garbage_collection():
        counts = {name: _count(each, clock, effort.turn_s) for name, each in contenders.items()}
        start = time.perf_counter()
        for number in range(effort.most):
            if number >= effort.least and (
                time.perf_counter() - start > effort.budget_s or all(map(_steady, taken.values()))
            ):
                break
            draw.shuffle(order)
            for name in order:
                taken[name].append(_turn(contenders[name], clock, counts[name]))
    return {name: RoundTimes(counts[name], tuple(taken[name])) for name in contenders}


def _turn(each: TimedCall, clock: Clock, count: int) -> float:
    """Return the seconds of one call; a first call warms the caches, and is not timed.

    A turn in which the system preempted this thread is repeated; if all were, the shortest counts. A call
    that waits by itself is not preempted.
    """
    least = math.inf
    for _ in range(MAX_ATTEMPTS):
        clock.settle()
        clock.seconds(each.calls(1))
        ready = each.calls(count)
        before = clock.interruptions()
        least = min(least, clock.seconds(ready) / count)
        if clock.interruptions() == before:
            break
    return least


def _count(each: TimedCall, clock: Clock, turn_s: float) -> int:
    """Return the number of calls that fill a turn."""
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
