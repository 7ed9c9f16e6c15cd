"""What the machine needs at least for an involution: calls that move as many bytes, or compute as much.

They take turns with what is measured, so that a slow moment of the machine slows them, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

import opsmith
from involution_measured.ways import Call, Setting
from opsmith.benchmarking.machine import copy

LANES = 128
"""Sums that a thread adds up side by side: more than one instruction after the other could hide."""


@opsmith.operator("involution_measured::multiply_adds", opaque=True, shapes="x: N -> N")
def multiply_adds(x: Tensor, rounds: int) -> Tensor:
    """Multiply each number by 0.999 and add one, so many times."""
    for _ in range(rounds):
        x = x * 0.999 + 1
    return x


multiply_adds.kernel(
    "cpu",
    cpp="""
    void multiply_adds(View<const float, 1> x, int64_t rounds, View<float, 1> y) {
      #pragma omp parallel for schedule(static, 1)
      for (int64_t block = 0; block < y.size(0) / 128; block++) {
        float sums[128];
        for (int lane = 0; lane < 128; lane++) sums[lane] = x(block * 128 + lane);
        for (int64_t round = 0; round < rounds; round++) {
          for (int lane = 0; lane < 128; lane++) sums[lane] = sums[lane] * 0.999f + 1.0f;
        }
        for (int lane = 0; lane < 128; lane++) y(block * 128 + lane) = sums[lane];
      }
    }
    """,
)


def moved_bytes(setting: Setting, dtype: torch.dtype, *, backward: bool) -> int:
    """Bytes to read and to write.

    Forward reads image and weight and writes the result. The backward reads what came back twice, image and
    weight, and writes two gradients.
    """
    image, weight, result = setting.numbers
    numbers = image + weight + result
    return (numbers + 2 * numbers * backward) * dtype.itemsize


def floors(setting: Setting, dtype: torch.dtype, *, backward: bool, threads: int) -> dict[str, Call]:
    """Calls that nothing that computes it can be faster than: a copy, and multiply-adds inside of the image.

    The copy reads and writes as many bytes as the involution, in the memory of as many. The arithmetic is
    that of float32, in which every dtype is added up: a plain loop, with three times as much with a backward.
    """
    moved = copy(torch.device("cpu"), moved_bytes(setting, dtype, backward=backward))
    start = torch.ones(LANES * threads)
    rounds = setting.multiply_adds_inside * (3 if backward else 1) // (LANES * threads)
    return {"a copy of its bytes": moved, "its multiply-adds": lambda: multiply_adds(start, rounds)}
