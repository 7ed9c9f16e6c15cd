"""Operators with kernels in CUDA C++, of every kind of argument that there is."""

from __future__ import annotations

from typing import Any

import kernel_cases
import torch
from kernel_cases import declared
from torch import Tensor

import opsmith

scaled = declared(kernel_cases.scaled, "cuda_kernels")
scaled.kernel(
    "cuda",
    cuda=r"""
template <class T>
__global__ void scaled(Contiguous<const T> x, double by, Optional<View<const T, 1>> shift, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = T(float(x[i]) * float(by) + (shift ? float((*shift)(0)) : 0.0f));
}
""",
    dtypes=[torch.float32, torch.float16, torch.bfloat16],
    grid="ceil(result.numel / 64)",
    block=64,
    max_spills=0,
    max_registers=64,
)


row_sums = declared(kernel_cases.row_sums, "cuda_kernels")
row_sums.kernel(
    "cuda",
    cuda=r"""
template <class T>
__global__ void __launch_bounds__(32) row_sums(View<const T, 2> x, View<T, 1> sums, View<int64_t, 1> counts) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= x.size(0)) return;
  T sum = 0;
  int64_t count = 0;
  for (int64_t j = 0; j < x.size(1); j++) {
    sum += x(i, j);
    count += x(i, j) > 0;
  }
  sums(i) = sum;
  counts(i) = count;
}
""",
    grid=lambda x: -(-x.shape[0] // 32),
    block=32,
)


channel_sums = declared(kernel_cases.channel_sums, "cuda_kernels")
channel_sums.kernel(
    "cuda",
    cuda=r"""
__global__ void channel_sums(ChannelsLast<const double> x, Contiguous<double, 4> y) {
  OPSMITH_EACH(at, y.numel()) {
    double sum = 0;
    for (int64_t c = 0; c < x.size(1); c++) sum += x.data[at * x.size(1) + c];
    y[at] = sum;
  }
}
""",
    grid=("min(result.numel, 2)", 1, 1),
    block=(8, 1, 1),
)


@opsmith.operator("cuda_kernels::told")
def told(
    x: Tensor,
    others: list[Tensor],
    sizes: list[int],
    weights: list[float],
    flags: list[bool],
    text: str,
    count: int,
    small: int,
    half: float,
    yes: bool,
    pair: int | tuple[int, int],
    maybe: int | None = None,
    part: float | None = None,
) -> Tensor:
    """The values of every kind of argument, as numbers; the text is no parameter of the kernel."""
    total = sum((other.sum() for other in others), start=x.new_zeros(()))
    numbers = [
        float(sum(sizes)),
        sum(weights),
        float(sum(flags)),
        float(count),
        float(small),
        half,
        float(yes),
        float(pair[0] * 10 + pair[1]),
        -1.0 if maybe is None else float(maybe),
        -1.0 if part is None else part,
    ]
    return torch.cat([total[None], torch.tensor(numbers, dtype=x.dtype, device=x.device)])


@told.fake
def _(x: Tensor, *_others: Any, **_more: Any) -> Tensor:
    return x.new_empty(11)


told.kernel(
    "cuda",
    cuda=r"""
__global__ void told(
    const View<const double> x, List<View<const double>, 3> others, List<int64_t> sizes,
    List<double, 5> weights, List<bool, 3> flags, int64_t count, int small, float half, bool yes,
    List<int64_t, 2> pair, Optional<int> maybe, Optional<double> part, View<double, 1> result) {
  if (blockIdx.x || threadIdx.x) return;
  for (int at = 0; at < 11; at++) result(at) = 0;
  for (const auto& other : others)
    for (int64_t at = 0; at < other.size(-1); at++) result(0) += other(at);
  for (int64_t each : sizes) result(1) += each;
  for (double each : weights) result(2) += each;
  for (bool each : flags) result(3) += each;
  result(4) = count;
  result(5) = small;
  result(6) = half;
  result(7) = yes;
  result(8) = pair[0] * 10 + pair[1];
  result(9) = maybe ? *maybe : -1.0;
  result(10) = part ? *part : -1.0;
}
""",
    grid=1,
    block=32,
)


@opsmith.operator("cuda_kernels::pooled")
def pooled(x: Tensor, size: int, largest: bool = False) -> Tensor:
    """The sum, or the largest, of each run of `size` numbers."""
    runs = x.reshape(-1, size)
    return runs.amax(1) if largest else runs.sum(1)


pooled.kernel(
    "cuda",
    cuda=r"""
template <int SIZE, class T, bool LARGEST = false>
__global__ void pooled(Contiguous<const T> x, int64_t size, bool largest, Contiguous<T, 1> y) {
  OPSMITH_EACH(i, y.numel()) {
    T found = x[i * SIZE];
#pragma unroll
    for (int at = 1; at < SIZE; at++) {
      const T next = x[i * SIZE + at];
      found = LARGEST ? (next > found ? next : found) : found + next;
    }
    y[i] = found;
  }
}
""",
    constants={"SIZE": "size", "LARGEST": lambda largest: largest},
    grid="ceil(result.numel / 32)",
    block=32,
    shared="16 * x.itemsize if largest else 0",
)


@pooled.samples
def _(make: opsmith.Make) -> Any:
    yield make(6), 2
    yield make(3, 4), 3, True
