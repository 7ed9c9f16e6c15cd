"""Timing: clocks, statistics of times, and contenders that take turns."""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opsmith.benchmarking.effort import BenchmarkEffort
from opsmith.core.collector import without_garbage_collection
from opsmith.display import short_repr

try:
    import resource
except ModuleNotFoundError:  # on Windows
    resource = None  # type: ignore[assignment]

Call = Callable[[], Any]

PAUSE_S = 0.02
"""Maximum pause in seconds before a turn: threads of the previous call spin, and slow down the next call."""
GLANCE_S = 0.001
"""Seconds between two observations of the threads."""
THREADS = Path("/proc/self/task")
"""Linux's folder of the threads of this process."""


class ProcessorClock:
    """Clock that measures the wall time of calls that block.

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
        end = time.perf_counter() + PAUSE_S
        while torch.get_num_threads() > 1 and time.perf_counter() < end and _other_threads_run():
            time.sleep(GLANCE_S)


def _other_threads_run() -> bool:
    """Return True if a different thread of this process runs, or if the system does not say."""
    own = str(threading.get_native_id())
    try:
        return any(_runs(each) for each in THREADS.iterdir() if each.name != own)
    except OSError:
        return True


def _runs(thread: Path) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
        return (thread / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R"
    return False


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
        """Return 0, because preemption of the host does not stop the GPU."""
        return 0

    def settle(self) -> None:
        """Wait for all queued work."""
        torch.cuda.synchronize(self._device)


Clock = ProcessorClock | CudaClock


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else ProcessorClock()


SURE = 0.95
"""Confidence level of an interval, if there are enough numbers."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of times.

    Args:
        median: The median.
        low, high: The quartiles; half of the times are between them.
        least: The smallest time.
        count: Number of times.
    """

    __repr__ = short_repr

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

    __repr__ = short_repr

    median: float
    low: float
    high: float
    sure: float


def ratio(numbers: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return the median of the ratios of each round; a slow round slows both times, so the ratio stays.

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
    """Return the number of ratios outside the interval at each end, and the interval's confidence."""
    outside, skipped = 2 * 0.5**count, 0
    for k in range(1, (count + 1) // 2):
        more = outside + 2 * math.comb(count, k) * 0.5**count
        if more > 1 - SURE:
            break
        outside, skipped = more, k
    return skipped, 1 - outside


MOST_CALLS = 10_000
MAX_ATTEMPTS = 4
"""Maximum number of attempts at a turn without preemption, while there is time."""
RETRIED_S = 0.05
"""Longest turn in seconds that is repeated after preemption; longer turns are always preempted."""
WARM_S = 0.1
"""Duration of a call, in seconds, from which on it warms the caches by itself."""
PREPARING = 4
"""Maximum time to prepare the calls of a turn, in turns: a forward may be slower than its backward."""
FEWEST = 3
"""Minimum number of rounds, regardless of the budget: by chance, all three are slower once in twenty."""
CONTENT = 0.5
"""Fraction of the budget after which `least` rounds are enough, since later timings need the rest."""
STEADY = 0.02
"""Rounds end once the spread of each contender, divided by the root of their number, is below this."""


@dataclass(frozen=True)
class TimedCall:
    """A call to time.

    Args:
        call: Makes one call.
        prepare: Function that returns the function to time instead of `call`. It is for a call that uses up
            its preparation, such as a backward, which frees its graph. The preparation is not timed.
        room: Maximum number of preparations that fit into memory.
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
    """Time contenders in turns, one turn each per round, so that a slowdown of the machine affects all.

    Args:
        contenders: The calls to time; each has run before.
        clock: The clock of their device.
        effort: Number of rounds, length of turns, and time limit of all these rounds.
        seed: Seed of the order within rounds.

    Example:
        >>> from opsmith.benchmarking.effort import EFFORTS
        >>> from opsmith.benchmarking.timing import ProcessorClock
        >>> one = {"sum": TimedCall(lambda: sum(range(99)))}
        >>> found = time_in_turns(one, ProcessorClock(), EFFORTS["quick"], 0)
        >>> len(found["sum"].seconds)
        7
    """
    order, draw = list(contenders), random.Random(seed)
    taken: dict[str, list[float]] = {name: [] for name in order}
    start = time.perf_counter()
    with without_garbage_collection():
        turns = {name: _count(each, clock, effort.turn_s) for name, each in contenders.items()}
        begun = time.perf_counter()
        for number in range(effort.most):
            now = time.perf_counter()
            spent = now - start
            if number >= effort.least and (
                spent > CONTENT * effort.budget_s or all(map(_steady, taken.values()))
            ):
                break
            if number >= min(FEWEST, effort.least) and spent + (now - begun) / number > effort.budget_s:
                break
            draw.shuffle(order)
            for name in order:
                attempts = MAX_ATTEMPTS if time.perf_counter() - start < effort.budget_s else 1
                taken[name].append(_turn(contenders[name], clock, *turns[name], attempts))
    return {name: RoundTimes(turns[name][0], tuple(taken[name])) for name in contenders}


def _turn(each: TimedCall, clock: Clock, count: int, once_s: float, attempts: int) -> float:
    """Return the seconds of one call.

    A first call warms the caches, and is not timed; a long call needs no such call. A turn in which the
    system preempted this thread is repeated, unless it is long. If all turns were preempted, the shortest
    counts. A call that waits voluntarily is not preempted.

    Args:
        each: The call.
        clock: The clock of its device.
        count: Number of calls.
        once_s: Approximate seconds of a call. attempts: Maximum number of attempts at a turn without
            preemption.
    """
    least = math.inf
    for _ in range(attempts):
        clock.settle()
        if once_s < WARM_S:
            clock.seconds(each.calls(1))
        ready = each.calls(count)
        before = clock.interruptions()
        taken = clock.seconds(ready)
        least = min(least, taken / count)
        if clock.interruptions() == before or taken > RETRIED_S:
            break
    return least


def _count(each: TimedCall, clock: Clock, turn_s: float) -> tuple[int, float]:
    """Return the number of calls that fill a turn, and the seconds of one call; a first call is not timed."""
    count = 1
    clock.settle()
    first = clock.seconds(each.calls(1))
    while first < WARM_S:
        begun = time.perf_counter()
        ready = each.calls(count)
        preparing = time.perf_counter() - begun
        taken = clock.seconds(ready)
        filled = max(taken, preparing / PREPARING)
        if filled >= turn_s or count >= min(MOST_CALLS, each.room):
            return count, taken / count
        wanted = int(1.2 * count * turn_s / max(filled, 1e-9)) + 1
        count = min(max(wanted, count + 1), 10 * count, MOST_CALLS, each.room)
    return 1, first


def _steady(seconds: list[float]) -> bool:
    return bool(spread(seconds).relative <= STEADY * len(seconds) ** 0.5)
