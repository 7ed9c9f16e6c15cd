"""Cost of a call in place, and of bundled operators, against torch's own of the same work, in one run.

Two operations: `x.mul_(2)`, and `cache.index_copy_(0, index, rows)`, which writes rows at given places. Each
as torch has it, by opsmith with the reference alone and with a kernel in C++, and as a
`torch.library.custom_op` that mutates; on 64 elements and on 4 MiB, without gradients. `out=` is
`torch.mul(x, 2, out=y)`.

`ops.adamw_` stands beside torch's fused AdamW on one parameter of [4096, 1024], and on 40 as of a small
network; `ops.rms_norm` beside `F.rms_norm` and compiled code at [4096, 1024], with and without its backward.

The ways take turns within each round; a figure is the median over rounds, a ratio the median of the ratios to
the first way within each round. Stated limits for opsmith with a kernel: 2.0 at 64 elements, 1.1 at 4 MiB;
1.05 for AdamW at [4096, 1024], and 1.0 beside each way of rms_norm.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import opsmith
from opsmith import ops

SIZES = {"64 elements": 64, "4 MiB": 2**20}
WIDTH = 16
"""Elements of a row."""

SCALE = """
#pragma GCC optimize("unroll-loops")
template <class T> void scale_(Contiguous<T> x, double by) {
  const T factor = T(by);
  T* data = &x[0];
  const int64_t count = x.numel();
  #pragma omp parallel for simd if (count > 32768)
  for (int64_t i = 0; i < count; i++) data[i] *= factor;
}
"""
SCALED = """
#pragma GCC optimize("unroll-loops")
template <class T> void scaled(Contiguous<const T> x, double by, Contiguous<T> result) {
  const T factor = T(by);
  const T* from = &x[0];
  T* to = &result[0];
  const int64_t count = x.numel();
  #pragma omp parallel for simd if (count > 32768)
  for (int64_t i = 0; i < count; i++) to[i] = from[i] * factor;
}
"""
STORE = """
#include <cstring>
template <class T>
void store(Contiguous<T, 2> cache, Contiguous<const int64_t, 1> index, Contiguous<const T, 2> rows) {
  const int64_t count = index.size(0), width = rows.size(1);
  for (int64_t i = 0; i < count; i++)
    OPSMITH_CHECK(index(i) >= 0 && index(i) < cache.size(0), "index %d is out of range", int(index(i)));
  #pragma omp parallel for if (count * width > 32768)
  for (int64_t i = 0; i < count; i++)
    std::memcpy(&cache(index(i), 0), &rows(i, 0), size_t(width) * sizeof(T));
}
"""


@opsmith.operator("inplace::scale_by_reference_", mutates=["x"], returns="x")
def scale_by_reference_(x: Tensor, by: float) -> Tensor:
    return x.mul_(by)


@opsmith.operator("inplace::scale_", mutates=["x"], returns="x")
def scale_(x: Tensor, by: float) -> Tensor:
    return x.mul_(by)


scale_.kernel("cpu", cpp=SCALE)


@torch.library.custom_op("inplace::scale_custom", mutates_args=("x",))
def scale_custom(x: Tensor, by: float) -> None:
    x.mul_(by)


@opsmith.operator("inplace::scaled")
def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


scaled.kernel("cpu", cpp=SCALED)


@opsmith.operator("inplace::store_by_reference", mutates=["cache"])
def store_by_reference(cache: Tensor, index: Tensor, rows: Tensor) -> None:
    cache.index_copy_(0, index, rows)


@opsmith.operator("inplace::store", mutates=["cache"])
def store(cache: Tensor, index: Tensor, rows: Tensor) -> None:
    cache.index_copy_(0, index, rows)


store.kernel("cpu", cpp=STORE)


@torch.library.custom_op("inplace::store_custom", mutates_args=("cache",))
def store_custom(cache: Tensor, index: Tensor, rows: Tensor) -> None:
    cache.index_copy_(0, index, rows)


def ways(size: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Calls to time, for each operation; torch's own is the first."""
    x, y = torch.ones(size), torch.empty(size)
    rows = torch.ones(size // WIDTH, WIDTH)
    cache, index = torch.zeros(2 * size // WIDTH, WIDTH), torch.randperm(2 * size // WIDTH)[: size // WIDTH]
    return {
        "mul_": {
            "torch": lambda: x.mul_(1.0),
            "opsmith, kernel in C++": lambda: scale_(x, 1.0),
            "opsmith, reference": lambda: scale_by_reference_(x, 1.0),
            "custom_op": lambda: scale_custom(x, 1.0),
        },
        "index_copy_": {
            "torch": lambda: cache.index_copy_(0, index, rows),
            "opsmith, kernel in C++": lambda: store(cache, index, rows),
            "opsmith, reference": lambda: store_by_reference(cache, index, rows),
            "custom_op": lambda: store_custom(cache, index, rows),
        },
        "out=": {
            "torch": lambda: torch.mul(x, 2.0, out=y),
            "opsmith, kernel in C++": lambda: scaled.out(x, 2.0, out=y),
        },
    }


LARGE = (4096, 1024)
MODEL = [(256, 256)] * 20 + [(256,)] * 20


def steps(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Steps of AdamW: the optimizer, its fused kernel alone, and ours."""
    theirs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    optimizer = torch.optim.AdamW(theirs, fused=True)
    for parameter in theirs:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = [optimizer.state[parameter] for parameter in theirs]
    lists: list[list[Tensor]] = [
        [parameter.detach() for parameter in theirs],
        [parameter.grad for parameter in theirs if parameter.grad is not None],
        *([each[name] for each in state] for name in ("exp_avg", "exp_avg_sq")),
    ]
    counts = [each["step"] for each in state]
    fixed: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8}
    kernel: Any = torch._fused_adamw_

    def fused() -> None:
        torch._foreach_add_(counts, 1)
        kernel(*lists, [], counts, amsgrad=False, maximize=False, **fixed)

    parameters, gradients, means, squares = ([each.clone() for each in tensors] for tensors in lists)
    step = torch.tensor(1.0)
    return {
        "torch": optimizer.step,
        "torch, its kernel alone": fused,
        "ops.adamw_": lambda: ops.adamw_(parameters, gradients, means, squares, step),
    }


def norms(dtype: torch.dtype, *, backward: bool) -> dict[str, Callable[[], Any]]:
    """Normalisations: torch's function, compiled code of two spellings, and ours."""
    x = torch.randn(LARGE).to(dtype).requires_grad_(backward)
    weight = torch.randn(LARGE[1]).to(dtype).requires_grad_(backward)
    cotangent = torch.randn(LARGE).to(dtype)

    def by_torch(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (LARGE[1],), weight, 1e-6)

    def spelt_out(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)

    def call(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        if not backward:
            return lambda: function(x, weight)
        return lambda: torch.autograd.grad(function(x, weight), (x, weight), cotangent)

    torch.compiler.reset()
    return {
        "torch": call(by_torch),
        "compiled": call(torch.compile(by_torch)),
        "compiled, spelt out": call(torch.compile(spelt_out)),
        "ops.rms_norm": call(ops.rms_norm),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, {given.threads} threads, {given.rounds} rounds")
    print("microseconds (ratio to torch's own)")
    for label, size in SIZES.items():
        for operation, calls in ways(size).items():
            report(label, operation, measure(calls, 400 if size < 1000 else 10, given.rounds))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        with torch.no_grad():
            report(name, "adamw", measure(steps([LARGE], dtype), 3, given.rounds))
            report(name, "adamw, 40", measure(steps(MODEL, dtype), 10, given.rounds))
            report(name, "rms_norm", measure(norms(dtype, backward=False), 3, given.rounds))
        report(name, "and backward", measure(norms(dtype, backward=True), 3, given.rounds))


def report(label: str, operation: str, figures: dict[str, tuple[float, float]]) -> None:
    for name, (cost, ratio) in figures.items():
        print(f"{label:12s} {operation:12s} {name:24s} {cost:9.2f} (x{ratio:5.2f})", flush=True)


def measure(calls: dict[str, Callable[[], Any]], count: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median microseconds of a call, and median ratio to torch's own, of each way."""
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    for timer in timers.values():
        timer.timeit(count)  # builds kernels, and makes the fast path

    def steady(timer: timeit.Timer) -> float:
        timer.timeit(max(count // 10, 2))  # what ran before has its own code and data in the caches
        return timer.timeit(count) / count * 1e6

    seen = [{name: steady(timer) for name, timer in timers.items()} for _ in range(rounds)]
    return {
        name: (
            statistics.median(each[name] for each in seen),
            statistics.median(each[name] / each["torch"] for each in seen),
        )
        for name in calls
    }


if __name__ == "__main__":
    main()
