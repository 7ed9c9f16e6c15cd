"""Cost of a call of a C++ kernel beyond the work: multiply 8 floats, by each way to call it, in one run.

The ways take turns within each round; a figure is the median over rounds, a ratio that of the ratios to aten,
called as `torch.ops.aten.mul.Tensor`, within each round. Stated limit through `torch.ops`: 2.0.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import opsmith

KERNEL = """
template <class T>
void multiplied(Contiguous<const T> x, Contiguous<const T> w, Contiguous<T> y) {
  for (int64_t i = 0; i < y.numel(); i++) y[i] = x[i] * w[i];
}
"""


@opsmith.operator("native_overhead::multiplied")
def multiplied(x: Tensor, w: Tensor) -> Tensor:
    """Multiply tensors of one shape."""
    return x * w


@opsmith.operator("native_overhead::sized", shapes="x: N, w: N -> N")
def sized(x: Tensor, w: Tensor) -> Tensor:
    """Multiply vectors whose length is another one in each call."""
    return x * w


multiplied.kernel("cpu", cpp=KERNEL, strict=True)
sized.kernel("cpu", cpp=KERNEL, entry="multiplied", strict=True)


@torch.library.custom_op("native_overhead::custom", mutates_args=())
def custom(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def ways() -> dict[str, Callable[[], Any]]:
    x, w = torch.randn(8), torch.randn(8)
    across = torch.randn(8, 2)[:, 0]
    vectors = itertools.cycle([(torch.randn(size), torch.randn(size)) for size in range(1, 200)])
    aten, native = torch.ops.aten.mul.Tensor, torch.ops.native_overhead.multiplied.default

    def another_size() -> Any:
        return sized(*next(vectors))

    return {
        "torch.ops.aten.mul.Tensor": lambda: aten(x, w),
        "torch.mul": lambda: torch.mul(x, w),
        "opsmith, its handle": lambda: multiplied(x, w),
        "opsmith, torch.ops": lambda: native(x, w),
        "opsmith, one input copied for its layout": lambda: multiplied(across, w),
        "opsmith, another size in each call (shapes=)": another_size,
        "torch.library.custom_op, torch.ops": lambda: torch.ops.native_overhead.custom.default(x, w),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    calls = ways()
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    for call in calls.values():
        for _ in range(3):
            call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            taken[name].append(min(timer.repeat(3, 5000)) / 5000)
    aten = next(iter(taken.values()))
    print(f"{'8 floats, no gradient':46} {'median':>9} {'of aten':>8}")
    for name, figures in taken.items():
        ratio = statistics.median(figure / base for figure, base in zip(figures, aten, strict=True))
        print(f"{name:46} {statistics.median(figures) * 1e6:6.2f} us {ratio:7.2f}x")
    kernel: Any = multiplied.specification.kernels[0].function
    print(f"copied for their layout: {kernel.copied}; forms that are known: {kernel.cached_plans}")


if __name__ == "__main__":
    main()
