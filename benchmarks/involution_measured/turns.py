"""Times of several calls, taken in turns in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from involution_measured.ways import Call

PAUSE_S = 0.02
"""Before each turn: the threads of the call before look for work for so long, at the cost of a single one."""
CALLS, TURN_S = 5, 0.1
"""Of a turn: so many calls, or fewer where they have taken so long; one before them does not count."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call."""

    least: float
    median: float


def in_turns(calls: Mapping[str, tuple[Call, int]], rounds: int) -> dict[str, Times]:
    """Time calls, each with its own number of threads."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):  # the first round compiles
        for name, (call, threads) in calls.items():
            torch.set_num_threads(threads)
            time.sleep(PAUSE_S)
            call()
            begun = time.perf_counter()
            for _ in range(CALLS):
                start = time.perf_counter()
                call()
                end = time.perf_counter()
                if number:
                    taken[name].append((end - start) * 1e3)
                if end - begun > TURN_S:
                    break
    return {name: Times(min(each), statistics.median(each)) for name, each in taken.items()}
