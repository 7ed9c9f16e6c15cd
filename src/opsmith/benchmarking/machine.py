"""The machine: what it is, how busy it is, and what it does at most."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from opsmith.benchmarking.clock import Clock, clock_of
from opsmith.benchmarking.result import Ceiling
from opsmith.checking.checker import environment

FOOTPRINTS = tuple(1 << power for power in range(12, 29, 2))
"""Bytes that the copies read and write together: from what fits any cache to what fits none."""

SIDES = {"cpu": 1024, "cuda": 4096}
"""Rows and columns of the matrices that are multiplied."""

REPEATS, TURN_S = 7, 0.01
SLOW_S = 0.5
"""What takes so long is measured once: products in a dtype that the processor has no instructions for."""


def surroundings(device: torch.device) -> dict[str, str]:
    """Versions and machine, as a benchmark keeps them."""
    found = environment()
    found["machine"] = platform.machine()
    found["processor"] = processor()
    found["capability"] = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def processor() -> str:
    """The name of the processor, and how many of them this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {processors()} of them"


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """How many programs wanted to run, on average of the last minute; None where the system does not tell."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def ceilings(device: torch.device, dtypes: Iterable[torch.dtype], largest: int) -> Iterator[Ceiling]:
    """Measure what a device does at most, with as many threads as torch has now.

    Args:
        device: The device.
        dtypes: In which to multiply matrices.
        largest: Bytes beyond which no copy is needed.
    """
    clock = clock_of(device)
    enough = next((each for each in FOOTPRINTS if each >= largest), FOOTPRINTS[-1])
    for footprint in FOOTPRINTS:
        if footprint > enough:
            break
        taken = least(copy(device, footprint), clock)
        yield Ceiling(device.type, "copy", footprint / taken, bytes=footprint)
    for dtype in dtypes:
        side = SIDES.get(device.type, 1024)
        taken = least(multiply(device, dtype, side), clock)
        operations = (8 if dtype.is_complex else 2) * side**3
        name = str(dtype).removeprefix("torch.")
        yield Ceiling(device.type, "multiply", operations / taken, dtype=name)


def higher(ceilings: Sequence[Ceiling], others: Sequence[Ceiling]) -> tuple[Ceiling, ...]:
    """The higher of two measurements of each ceiling: what disturbs one only lowers it."""
    pairs = zip(ceilings, others, strict=True)
    return tuple(one if one.rate >= other.rate else other for one, other in pairs)


def copy(device: torch.device, footprint: int) -> Callable[[], object]:
    """A copy that reads and writes so many bytes together."""
    source = torch.ones(max(footprint // 2, 1), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def multiply(device: torch.device, dtype: torch.dtype, side: int) -> Callable[[], object]:
    """A product of two square matrices."""
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def least(call: Callable[[], object], clock: Clock) -> float:
    """The shortest that a call takes: a ceiling is what the machine does undisturbed."""
    call()
    once = max(clock.seconds([call]), 1e-7)
    if once > SLOW_S:
        return once
    count = max(1, min(10_000, int(TURN_S / once)))
    return min(clock.seconds([call] * count) / count for _ in range(REPEATS))
