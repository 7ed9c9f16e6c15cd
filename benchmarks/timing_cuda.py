"""Times of calls on a GPU: what benchmarks of CUDA kernels share."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def milliseconds(call: Callable[[], object], rounds: int, scratch: Tensor) -> float:
    """The median time of a call, from one event to another, with nothing of its data in the cache."""
    taken = []
    for number in range(rounds + 5):
        scratch.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        call()
        end.record()
        end.synchronize()
        if number >= 5:
            taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def is_ours(operator: Any, *arguments: Any) -> None:
    """Nothing is timed that a reference computes."""
    found = operator.explain(*arguments)
    if found.kernel is None or found.kernel.device != "cuda":
        raise SystemExit(f"{operator.name} runs no CUDA kernel here: {found.forward}")
