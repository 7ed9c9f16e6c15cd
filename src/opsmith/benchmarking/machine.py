"""Machine of a benchmark: its description, its load, and its ceilings of bandwidth and arithmetic."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from opsmith.benchmarking.result import Ceiling
from opsmith.benchmarking.timing import Clock, clock_of
from opsmith.build.processor import cpu_info
from opsmith.build.toolchain import processors
from opsmith.checking.checker import environment

FOOTPRINTS = tuple(1 << power for power in range(12, 29, 2))
"""Bytes read plus bytes written of each copy: from less than the smallest cache to more than the largest."""

SIDES = {"cpu": 1024, "cuda": 4096}
"""Number of rows and columns of the matrices."""

REPEATS, TURN_S = 7, 0.01
AGREED = 1.01
"""Ratio of the two shortest turns below which no further turn is made."""
SLOW_S = 0.5
"""A longer call, in seconds, is measured only once, as a product in a dtype without instructions."""


def environment_of(device: torch.device) -> dict[str, str]:
    """Describe versions and machine, for the environment of a benchmark."""
    found = environment()
    found["machine"] = platform.machine()
    found["processor"] = processor()
    found["capability"] = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def processor() -> str:
    """Return the name of the processor, and the number of processors that this process may use."""
    name = cpu_info().get("model name") or platform.processor() or platform.machine()
    return f"{name}, {processors()} of them"


def load() -> float | None:
    """Return the load average of the last minute; None if the system has none."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def ceilings(device: torch.device, dtypes: Iterable[torch.dtype], largest: int) -> Iterator[Ceiling]:
    """Measure the ceilings of a device, with the current number of threads of torch.

    Args:
        device: The device.
        dtypes: dtypes of the matrix products.
        largest: Bytes of the largest copy that is needed.
    """
    clock = clock_of(device)
    limit = next((each for each in FOOTPRINTS if each >= largest), FOOTPRINTS[-1])
    for footprint in FOOTPRINTS:
        if footprint > limit:
            break
        taken = shortest_time(copy(device, footprint), clock)
        yield Ceiling(device.type, "copy", footprint / taken, bytes=footprint)
    for dtype in dtypes:
        side = SIDES.get(device.type, 1024)
        taken = shortest_time(multiply(device, dtype, side), clock)
        operations = (8 if dtype.is_complex else 2) * side**3
        name = str(dtype).removeprefix("torch.")
        yield Ceiling(device.type, "multiply", operations / taken, dtype=name)


def higher_ceilings(ceilings: Sequence[Ceiling], others: Sequence[Ceiling]) -> tuple[Ceiling, ...]:
    """Measure each ceiling twice and return the higher values, since disturbances only lower them."""
    pairs = zip(ceilings, others, strict=True)
    return tuple(one if one.rate >= other.rate else other for one, other in pairs)


def copy(device: torch.device, footprint: int) -> Callable[[], object]:
    """Return a function that copies; the bytes that it reads and writes have this sum."""
    source = torch.ones(max(footprint // 2, 1), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def multiply(device: torch.device, dtype: torch.dtype, side: int) -> Callable[[], object]:
    """Return a function that multiplies two square matrices."""
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def shortest_time(call: Callable[[], object], clock: Clock) -> float:
    """Return the shortest time of a call, since a ceiling is a property of the undisturbed machine."""
    call()
    once = max(clock.seconds([call]), 1e-7)
    if once > SLOW_S:
        return once
    count = max(1, min(10_000, int(TURN_S / once)))
    turns: list[float] = []
    while len(turns) < REPEATS and (len(turns) < 3 or turns[1] > AGREED * turns[0]):
        turns = sorted([*turns, clock.seconds([call] * count)])
    return turns[0] / count
