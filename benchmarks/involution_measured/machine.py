"""What the machine can do at most, measured: how fast it copies memory, how fast it multiplies matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from involution_measured.ways import Setting
from opsmith.benchmarking.machine import copy, multiply, shortest_time
from opsmith.benchmarking.timing import clock_of

COPIED = 1 << 29
"""Bytes that the copy reads and writes together: more than any cache holds."""
SIDE = 2048


@dataclass(frozen=True)
class Machine:
    """Ceilings, with as many threads as they were measured with.

    Args:
        bytes_per_s: Read and written together, in a copy of what no cache holds.
        multiply_adds_per_s: In a product of matrices of this dtype.
    """

    bytes_per_s: float
    multiply_adds_per_s: float

    def floor_ms(self, setting: Setting, dtype: torch.dtype, *, backward: bool) -> tuple[float, float]:
        """Milliseconds for memory, and for arithmetic: nothing that computes it takes less than the larger.

        Forward reads image and weight and writes the result. The backward reads what came back twice, image
        and weight, and writes two gradients: three times as much arithmetic with the forward.
        """
        image, weight, result = setting.numbers
        numbers = image + weight + result
        numbers += 2 * (image + weight + result) if backward else 0
        moved = numbers * dtype.itemsize / self.bytes_per_s
        computed = setting.multiply_adds * (3 if backward else 1) / self.multiply_adds_per_s
        return moved * 1e3, computed * 1e3


def measured(dtype: torch.dtype, threads: int) -> Machine:
    """Measure the ceilings, with so many threads."""
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    clock = clock_of(cpu)
    copied = COPIED / shortest_time(copy(cpu, COPIED), clock)
    return Machine(copied, SIDE**3 / shortest_time(multiply(cpu, dtype, SIDE), clock))
