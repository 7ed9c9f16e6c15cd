"""Tokens per second of a network: prefill, and decode steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.ops.decoder import Decoder, PagedCache

Step = Callable[[Tensor, PagedCache], Tensor]
Prefill = Callable[[Tensor, Tensor, PagedCache], Tensor]


@dataclass
class Contender:
    """The prefill and the decode step of a network, as they are or compiled, and a cache.

    Args:
        name: Name in the table.
        prefill: Prefill.
        step: Decode step.
        cache: Cache, whose sequences have all of their blocks.
    """

    name: str
    prefill: Prefill
    step: Step
    cache: PagedCache


def contender(name: str, network: Decoder, sequences: int, *, compiled: bool = False) -> Contender:
    """A contender with a cache of its own."""
    cache = PagedCache(network.sizes, sequences)
    cache.reserve([network.sizes.positions] * sequences)
    if compiled:
        prefill, step = (torch.compile(each, fullgraph=True) for each in (network.prefill, network.decode))
        return Contender(f"{name}, compiled", prefill, step, cache)
    return Contender(name, network.prefill, network.decode, cache)


def decode_rates(
    contenders: Sequence[Contender], length: int, steps: int, rounds: int
) -> dict[str, list[float]]:
    """Tokens per second of decode steps after `length` tokens; the contenders take turns in each round."""
    rates: dict[str, list[float]] = {each.name: [] for each in contenders}
    for number in range(rounds + 1):
        for each in contenders:
            tokens = torch.zeros(each.cache.sequences, dtype=torch.int64)
            each.cache.lengths.fill_(length)
            start = time.perf_counter()
            for _ in range(steps):
                tokens = each.step(tokens, each.cache).argmax(-1)
            seconds = time.perf_counter() - start
            if number:  # the first round compiles, and fills the caches of the processor
                rates[each.name].append(each.cache.sequences * steps / seconds)
    return rates


def prefill_rates(contenders: Sequence[Contender], length: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of prefills of so many tokens."""
    rates: dict[str, list[float]] = {each.name: [] for each in contenders}
    for number in range(rounds + 1):
        for each in contenders:
            count = each.cache.sequences
            tokens, lengths = torch.zeros(count, length, dtype=torch.int64), torch.full((count,), length)
            start = time.perf_counter()
            each.prefill(tokens, lengths, each.cache)
            seconds = time.perf_counter() - start
            if number:
                rates[each.name].append(count * length / seconds)
    return rates


def lines(rates: dict[str, list[float]], baseline: str) -> list[str]:
    """A line for each contender: its median rate, and the median of its ratios to the baseline's."""
    return [
        f"{name:34s} {statistics.median(seen):9.0f} tokens/s   "
        f"x{statistics.median(a / b for a, b in zip(seen, rates[baseline], strict=True)):.2f}"
        for name, seen in rates.items()
    ]


def allocations(call: Callable[[], object]) -> list[int]:
    """The bytes of each tensor memory that a call allocates, also of what it frees again before it ends."""
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as run:
        call()
    waiting: list[Any] = list(run.profiler.kineto_results.experimental_event_tree())
    sizes = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation" and event.extra_fields.alloc_size > 0:
            sizes.append(event.extra_fields.alloc_size)
    return sizes
