"""Times of calls on a GPU: what benchmarks of CUDA kernels share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

AHEAD = 40
"""How often the cache is written over: the GPU is busy until the call is queued, and it alone is timed."""


def milliseconds(call: Callable[[], object], rounds: int, scratch: Tensor) -> float:
    """The median time that a call takes on the GPU, with nothing of its data in the cache."""
    taken = []
    for number in range(rounds + 5):
        for _ in range(AHEAD):
            scratch.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        call()
        end.record()
        end.synchronize()
        if number >= 5:
            taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def microseconds_of_host(call: Callable[[], object], rounds: int) -> float:
    """The median time until a call returns, where the GPU has nothing else to do."""
    taken = []
    for number in range(rounds + 5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if number >= 5:
            taken.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(taken)


def is_ours(operator: Any, *arguments: Any) -> None:
    """Nothing is timed that a reference computes."""
    found = operator.explain(*arguments)
    if found.kernel is None or found.kernel.device != "cuda":
        raise SystemExit(f"{operator.name} runs no CUDA kernel here: {found.forward}")
