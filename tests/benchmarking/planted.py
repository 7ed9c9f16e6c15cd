"""Benchmarks whose times are drawn, not measured: with noise, with drift, and with slowdowns planted."""

from __future__ import annotations

import random
from collections.abc import Mapping

from opsmith.benchmarking import Benchmark
from opsmith.benchmarking.result import BenchmarkCase, Ceiling, Contender, MemoryUse, Timing, Work

ENVIRONMENT = {"machine": "x86_64", "processor": "a processor", "devices": "cpu", "torch": "2.13.0"}
BASE = {"native": 1e-3, "reference": 4e-3, "compiled": 2e-3, "copy": 2e-4, "multiply": 5e-5}


def times(draw: random.Random, base: float, noise: float, rounds: int) -> tuple[float, ...]:
    """Times with a floor and a long tail: some rounds are disturbed, a few of them much."""
    found = []
    for _ in range(rounds):
        disturbed = draw.random()
        tail = 1.0 + (draw.expovariate(2.0) if disturbed < 0.1 else 0.0)
        found.append(base * tail * (1 + abs(draw.gauss(0, noise))))
    return tuple(found)


def planted(
    seed: int,
    *,
    slowdown: float = 1.0,
    of: str = "native",
    directions: tuple[str, ...] = ("forward", "backward", "both"),
    drift: float = 1.0,
    noise: float = 0.03,
    rounds: int = 11,
    sizes: tuple[int, ...] = (1024, 65536, 1048576),
    environment: Mapping[str, str] = ENVIRONMENT,
    threads: int = 2,
    operator: str = "demo::op",
    source: str = "5e1f",
    slow_directions: tuple[str, ...] | None = None,
) -> Benchmark:
    """A benchmark with drawn times; `drift` is what the whole machine is slower by."""
    draw = random.Random(seed)
    cases = []
    for size in sizes:
        timings = []
        for direction in directions:
            for name, base in BASE.items():
                slow = slowdown if name == of and direction in (slow_directions or directions) else 1.0
                much = drift * draw.lognormvariate(0, noise / 3)  # no two runs are alike
                scale = size / 1024 * (1 if direction == "forward" else 2)
                seconds = times(draw, base * scale * slow * much, noise, rounds)
                timings.append(Timing(name, direction, 10, seconds))
        cases.append(
            BenchmarkCase(
                label=f"N={size}",
                sizes={"N": size},
                arguments=(f"x [{size}]",),
                elements=size,
                dtype="float32",
                device="cpu",
                role="size",
                contenders=(
                    Contender("native", "operator", "kernel for cpu, op.cpp:3"),
                    Contender("reference", "reference", "PyTorch, op.py:5", source=source),
                    Contender("compiled", "compiled", "torch.compile", compile_s=3.25, source=source),
                    Contender(
                        "other", "baseline", "op.py:9", left_out="it computes something else: its shape"
                    ),
                ),
                timings=tuple(timings),
                work=tuple(Work(each, 8 * size, 20 * size, "of the reference") for each in directions),
                memory=(
                    MemoryUse("native", 4 * size, 0, 4 << 20, "growth of the resident memory"),
                    MemoryUse("reference", 4 * size, 4 * size, None, "under 1 MiB"),
                ),
                notes=("a note",),
            )
        )
    ceilings = (
        Ceiling("cpu", "copy", 5e9, bytes=4096),
        Ceiling("cpu", "copy", 4e10, bytes=1 << 18),
        Ceiling("cpu", "copy", 1e10, bytes=1 << 28),
        Ceiling("cpu", "multiply", 1e11, dtype="float32"),
    )
    load = {"processors": 2.0, "before": 0.1, "after": 1.0}
    remarks = ("sizes grown from sample 0",)
    return Benchmark(
        operator,
        "default",
        seed,
        threads,
        environment,
        load,
        ceilings,
        tuple(cases),
        remarks,
        {"check": 2.5, "total": 20.0},
    )
