"""Clocks: how long so many calls take, on the processor or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

try:
    import resource
except ModuleNotFoundError:  # on Windows
    resource = None  # type: ignore[assignment]

Call = Callable[[], Any]

PAUSE_S = 0.02
"""Before each turn: the threads of the call before look for work for so long, at the cost of the next."""


class Clock(Protocol):
    """What measures calls on one device."""

    def seconds(self, calls: list[Call]) -> float:
        """How long the calls take, made one after the other."""
        ...

    def interruptions(self) -> int:
        """How often the system has let another program run in the place of the calling thread."""
        ...

    def settle(self) -> None:
        """Wait until nothing of what ran before is still at work."""
        ...


class ProcessorClock:
    """Wall time of the calling thread, which waits for all that a call does.

    Example:
        >>> 0 <= ProcessorClock().seconds([lambda: None]) < 1
        True
    """

    def seconds(self, calls: list[Call]) -> float:
        """How long the calls take, made one after the other."""
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start

    def interruptions(self) -> int:
        """Switches away from this thread that it did not ask for; 0 where the system does not count them."""
        thread = getattr(resource, "RUSAGE_THREAD", None)  # which Linux has
        return 0 if thread is None else resource.getrusage(thread).ru_nivcsw

    def settle(self) -> None:
        """Wait for the threads of the call before to go to sleep."""
        if torch.get_num_threads() > 1:
            time.sleep(PAUSE_S)


class CudaClock:
    """Time on a GPU, between two events in the stream that the calls are queued in.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, calls: list[Call]) -> float:
        """How long the GPU takes from the first of the calls to the end of the last."""
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
        """None: the GPU works on what is queued."""
        return 0

    def settle(self) -> None:
        """Wait for everything that was queued."""
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock for a device."""
    return CudaClock(device) if device.type == "cuda" else ProcessorClock()
