"""CUDA kernels as tutorials write them: right ones, and what is commonly wrong with them.

Where a fault is one that people have reported, the comment names the kind of report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import opsmith


@dataclass(frozen=True)
class KernelCase:
    """A kernel, its reference, and a call.

    Args:
        name: Name of the operator and of the kernel.
        text: Source; `KERNEL` stands for the name.
        reference: What it computes.
        arguments: Arguments of the call.
        launch: Options of the launch.
        cause: Cause that is found; `wrong values` if a comparison alone shows it; empty for a right kernel.
    """

    name: str
    text: str
    reference: Callable[..., Any]
    arguments: tuple[Any, ...]
    launch: dict[str, Any] = field(default_factory=dict)
    cause: str = ""

    def operator(self) -> opsmith.Operator[..., Any]:
        """The operator with this kernel, declared anew."""
        operator = opsmith.operator(f"emulated_kernels::{self.name}")(self.reference)
        text = self.text.replace("KERNEL", self.name)
        return operator.kernel("cuda", cuda=text, entry=self.name, **self.launch)

    def __str__(self) -> str:
        return self.name


def with_fault(
    right: KernelCase,
    name: str,
    cause: str,
    before: str,
    after: str,
    launch: Mapping[str, Any] | None = None,
) -> KernelCase:
    """A right kernel with a part of its text or of its launch replaced."""
    assert before in right.text, (name, before)
    text = right.text.replace(before, after, 1)
    return KernelCase(name, text, right.reference, right.arguments, {**right.launch, **(launch or {})}, cause)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# ---- Right kernels.

ADDED = """
template <class T>
__global__ void KERNEL(Contiguous<const T> x, Contiguous<const T> other, Contiguous<T> y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < y.numel()) y[i] = x[i] + other[i];  // element
}
"""
REDUCED = """
template <class T>
__global__ void KERNEL(Contiguous<const T, 2> x, Contiguous<T, 1> y) {
  extern __shared__ float partial[];
  const int row = blockIdx.x, size = x.size(1);
  float sum = 0;
  for (int j = threadIdx.x; j < size; j += blockDim.x) sum += x[row * size + j];
  partial[threadIdx.x] = sum;  // own
  __syncthreads();  // first
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];  // fold
    __syncthreads();  // each
  }
  if (threadIdx.x == 0) y[row] = partial[0];  // result
}
"""
SCANNED = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 2> y) {
  __shared__ float held[2][64];
  const int i = threadIdx.x, row = blockIdx.x;
  int from = 0, to = 1;
  held[from][i] = x(row, i);
  __syncthreads();
  for (int step = 1; step < 64; step *= 2) {
    held[to][i] = held[from][i] + (i >= step ? held[from][i - step] : 0);  // sum
    __syncthreads();  // step
    from = 1 - from, to = 1 - to;  // swap
  }
  y(row, i) = held[from][i];
}
"""
TRANSPOSED = """
template <class T>
__global__ void KERNEL(Contiguous<const T, 2> x, Contiguous<T, 2> y) {
  __shared__ T tile[16][17];
  const int rows = x.size(0), columns = x.size(1);
  int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
  if (i < rows && j < columns) tile[threadIdx.y][threadIdx.x] = x(i, j);  // load
  __syncthreads();  // loaded
  i = blockIdx.x * 16 + threadIdx.y, j = blockIdx.y * 16 + threadIdx.x;
  if (i < columns && j < rows) y(i, j) = tile[threadIdx.x][threadIdx.y];  // store
}
"""
PRODUCT = """
template <class T>
__global__ void KERNEL(Contiguous<const T, 2> a, Contiguous<const T, 2> b, Contiguous<T, 2> c) {
  __shared__ T left[8][8], right[8][8];
  const int rows = a.size(0), inner = a.size(1), columns = b.size(1);
  const int i = blockIdx.y * 8 + threadIdx.y, j = blockIdx.x * 8 + threadIdx.x;
  T sum = 0;
  for (int first = 0; first < inner; first += 8) {
    const int k = first + threadIdx.x, l = first + threadIdx.y;
    left[threadIdx.y][threadIdx.x] = i < rows && k < inner ? a(i, k) : T(0);  // left
    right[threadIdx.y][threadIdx.x] = l < inner && j < columns ? b(l, j) : T(0);  // right
    __syncthreads();  // loaded
    for (int at = 0; at < 8; at++) sum += left[threadIdx.y][at] * right[at][threadIdx.x];  // use
    __syncthreads();  // used
  }
  if (i < rows && j < columns) c(i, j) = sum;  // result
}
"""
STENCIL = """
template <class T>
__global__ void KERNEL(Contiguous<const T, 1> x, Contiguous<T, 1> y) {
  __shared__ T held[32 + 2];
  const int n = x.numel(), i = blockIdx.x * 32 + threadIdx.x, at = threadIdx.x + 1;
  held[at] = i < n ? x[i] : T(0);  // middle
  if (threadIdx.x == 0) held[0] = i > 0 ? x[i - 1] : T(0);  // before
  if (threadIdx.x == 31) held[33] = i + 1 < n ? x[i + 1] : T(0);  // behind
  __syncthreads();  // loaded
  if (i < n) y[i] = held[at - 1] + held[at] + held[at + 1];  // sum
}
"""
SOFTMAX = """
__device__ float largest(float value) {
  for (int by = 16; by > 0; by /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, by));
  return value;
}
__device__ float total(float value) {
  for (int by = 16; by > 0; by /= 2) value += __shfl_xor_sync(0xffffffffu, value, by);  // total
  return value;
}
template <class T>
__global__ void KERNEL(Contiguous<const T, 2> x, Contiguous<T, 2> y) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y, size = x.size(1);
  if (row >= x.size(0)) return;  // a warp together
  float high = -INFINITY, sum = 0;
  for (int j = threadIdx.x; j < size; j += 32) high = fmaxf(high, float(x(row, j)));
  high = largest(high);
  for (int j = threadIdx.x; j < size; j += 32) sum += __expf(float(x(row, j)) - high);
  sum = total(sum);
  for (int j = threadIdx.x; j < size; j += 32) y(row, j) = T(__expf(float(x(row, j)) - high) / sum);
}
"""
NORMED = """
template <class T>
__global__ void KERNEL(View<const T, 2> x, Contiguous<const T, 1> weight, double eps, View<T, 2> y) {
  __shared__ float sums[32];
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float sum = 0;
  for (int j = threadIdx.x; j < x.size(1); j += blockDim.x) sum += float(x(row, j)) * float(x(row, j));
  for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
  if (lane == 0) sums[warp] = sum;  // of a warp
  __syncthreads();  // all warps
  if (warp == 0) {
    sum = lane < warps ? sums[lane] : 0;  // of all warps
    for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
    if (lane == 0) sums[0] = rsqrtf(sum / x.size(1) + float(eps));  // scale
  }
  __syncthreads();  // scaled
  for (int j = threadIdx.x; j < x.size(1); j += blockDim.x)
    y(row, j) = T(float(x(row, j)) * sums[0] * float(weight[j]));  // result
}
"""
HISTOGRAM = """
__global__ void KERNEL(Contiguous<const int64_t, 1> x, Contiguous<int64_t, 1> y) {
  __shared__ int counts[16];
  if (threadIdx.x < 16) counts[threadIdx.x] = 0;  // zero
  __syncthreads();  // zeros
  for (int i = threadIdx.x; i < x.numel(); i += blockDim.x) atomicAdd(&counts[x[i]], 1);  // count
  __syncthreads();  // counted
  if (threadIdx.x < 16) y[threadIdx.x] = counts[threadIdx.x];  // result
}
"""
WARP_SUM = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ float held[64];
  const int i = threadIdx.x;
  held[i] = x[blockIdx.x * 64 + i];
  __syncthreads();
  if (i < 32) {
    float sum = held[i];
    for (int by = 32; by > 0; by /= 2) {
      if (i < by) sum += held[i + by];  // read
      __syncwarp();  // read all
      held[i] = sum;  // write
      __syncwarp();  // written
    }
    if (i == 0) y[blockIdx.x] = held[0];
  }
}
"""
FOURS = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  const int n = x.numel(), i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (i + 3 < n) {  // whole
    float4 four = *reinterpret_cast<const float4*>(x.data + i);  // load
    four.x *= 2, four.y *= 2, four.z *= 2, four.w *= 2;
    *reinterpret_cast<float4*>(y.data + i) = four;  // store
  } else {
    for (int j = i; j < n; j++) y[j] = x[j] * 2;  // rest
  }
}
"""
SIDES = """
template <class T, int K>
__global__ void KERNEL(Contiguous<const T, 1> x, int k, Contiguous<T, 1> y) {
  __shared__ T held[64];
  T window[K];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  for (int at = 0; at < K; at++) {
    const int j = i + at - K / 2;
    window[at] = j >= 0 && j < x.numel() ? x[j] : T(0);
  }
  T sum = 0;
  for (int at = 0; at < K; at++) sum += window[at];
  held[threadIdx.x] = sum;
  if (i < y.numel()) y[i] = held[threadIdx.x];
}
"""
LOCKED = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ int lock;
  __shared__ float sum;
  if (threadIdx.x == 0) lock = 0, sum = 0;
  __syncthreads();
  bool done = false;
  while (!done) {
    if (atomicCAS(&lock, 0, 1) == 0) {
      __threadfence_block();
      sum += x[threadIdx.x];  // guarded
      __threadfence_block();  // release
      atomicExch(&lock, 0);
      done = true;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) y[0] = sum;
}
"""
DOUBLED = """
__device__ double added(double* at, double value) {
  unsigned long long* bits = (unsigned long long*)at;
  unsigned long long old = *bits, assumed;
  do {
    assumed = old;
    old = atomicCAS(bits, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
  } while (assumed != old);
  return __longlong_as_double(old);
}
__global__ void KERNEL(Contiguous<const double, 1> x, Contiguous<double, 1> y) {
  __shared__ double sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  added(&sum, x[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) y[0] = sum;
}
"""
BALLOTED = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<int64_t, 1> y) {
  const int lane = threadIdx.x;
  int found = 0;
  for (int j = lane; j < x.size(1); j += 32) {
    const unsigned active = __activemask();
    found += __popc(__ballot_sync(active, x(blockIdx.x, j) > 0)) * (lane == 0);
  }
  if (lane == 0) y[blockIdx.x] = found;
}
"""
RETURNED = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ float held[32];
  const int i = blockIdx.x * 32 + threadIdx.x;
  if (i >= x.numel()) return;
  held[threadIdx.x] = x[i];
  __syncthreads();
  y[i] = held[0] + held[threadIdx.x];
}
"""
STRIDED = """
template <class T>
__global__ void KERNEL(View<const T, 2> x, View<T, 2> y) {
  OPSMITH_EACH(at, y.numel()) {
    const int64_t i = at / y.size(1), j = at % y.size(1);
    y(i, j) = x(i, j) * T(2);
  }
}
"""
CONSTANT = """
__constant__ float taps[3] = {0.25f, 0.5f, 0.25f};
__device__ int used;
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  const int i = threadIdx.x, n = x.numel();
  if (i >= n) return;
  float sum = 0;
  for (int k = 0; k < 3; k++) {
    const int j = min(max(i + k - 1, 0), n - 1);
    sum += taps[k] * __ldg(&x.data[j]);
  }
  y[i] = sum;
  if (i == 0) used = n;
}
"""
STRUCTS = """
struct Best { float value; int at; };
__device__ Best better(Best a, Best b) {
  return a.value > b.value || (a.value == b.value && a.at < b.at) ? a : b;
}
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<int64_t, 1> y) {
  __shared__ Best held[64];
  Best mine{-INFINITY, 0};
  for (int j = threadIdx.x; j < x.size(1); j += 64) mine = better(mine, {x(blockIdx.x, j), j});
  held[threadIdx.x] = mine;
  for (int half = 32; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) held[threadIdx.x] = better(held[threadIdx.x], held[threadIdx.x + half]);
  }
  if (threadIdx.x == 0) y[blockIdx.x] = held[0].at;
}
"""
LAST_BLOCK = """
__device__ unsigned arrived;
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> partial, Contiguous<float, 1> y) {
  __shared__ bool last;
  float sum = 0;
  for (int j = 0; j < 8; j++) sum += x[blockIdx.x * 8 + j];
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sum;  // partial
    __threadfence();  // publish
    last = atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float all = 0;
    for (int at = 0; at < gridDim.x; at++) all += partial[at];  // collect
    y[0] = all;
  }
}
"""
HALVES = """
#include <cuda_fp16.h>
__global__ void KERNEL(Contiguous<const Half, 1> x, Contiguous<Half, 1> y) {
  const int i = threadIdx.x;
  const __half2* from = reinterpret_cast<const __half2*>(x.data);
  __half2* to = reinterpret_cast<__half2*>(y.data);
  if (2 * i + 1 < x.numel()) to[i] = __hadd2(from[i], from[i]);
}
"""


def double(x: Tensor) -> Tensor:
    return x * 2


def row_sums(x: Tensor) -> Tensor:
    return x.sum(1)


def total(x: Tensor) -> Tensor:
    return x.sum(0, keepdim=True)


def added(x: Tensor, other: Tensor) -> Tensor:
    return x + other


def scanned(x: Tensor) -> Tensor:
    return x.cumsum(1)


def transposed(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def stencil(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (1, 1))
    return padded[:-2] + padded[1:-1] + padded[2:]


def softmax(x: Tensor) -> Tensor:
    return x.softmax(1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(1, keepdim=True) + eps) * weight


def histogram(x: Tensor) -> Tensor:
    return torch.bincount(x, minlength=16)[:16] if x.device.type != "meta" else x.new_empty(16)


def warp_sum(x: Tensor) -> Tensor:
    return x.view(-1, 64).sum(1)


def sides(x: Tensor, k: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (k // 2, k // 2))
    return padded.unfold(0, k, 1).sum(1)


def positive(x: Tensor) -> Tensor:
    return (x > 0).sum(1)


def first_added(x: Tensor) -> Tensor:
    firsts = x[(torch.arange(len(x), device=x.device) // 32) * 32]
    return firsts + x


def smoothed(x: Tensor) -> Tensor:
    padded = torch.cat([x[:1], x, x[-1:]])
    return 0.25 * padded[:-2] + 0.5 * padded[1:-1] + 0.25 * padded[2:]


def largest(x: Tensor) -> Tensor:
    return x.argmax(1)


def partial_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    partial = x.view(-1, 8).sum(1)
    return partial, partial.sum(0, keepdim=True)


ROWS = {"grid": "x.shape[0]", "block": 32, "shared": "32 * 4"}
TILES = {"grid": ("ceil(x.shape[1] / 16)", "ceil(x.shape[0] / 16)"), "block": (16, 16)}
PRODUCT_TILES = {"grid": ("ceil(b.shape[1] / 8)", "ceil(a.shape[0] / 8)"), "block": (8, 8)}
NORM = {"grid": "x.shape[0]", "block": 64}
OF_32 = {"grid": "ceil(x.numel / 32)", "block": 32}
COUNTED = torch.arange(200) * 7 % 16

RIGHT = [
    KernelCase("added", ADDED, added, (numbers(70), numbers(70)), OF_32),
    KernelCase("reduced", REDUCED, row_sums, (numbers(3, 70),), ROWS),
    KernelCase("scanned", SCANNED, scanned, (numbers(2, 64),), {"grid": "x.shape[0]", "block": 64}),
    KernelCase("transposed", TRANSPOSED, transposed, (numbers(20, 35),), TILES),
    KernelCase("product", PRODUCT, product, (numbers(9, 13), numbers(13, 10)), PRODUCT_TILES),
    KernelCase("stencil", STENCIL, stencil, (numbers(64),), OF_32),
    KernelCase(
        "softmax", SOFTMAX, softmax, (numbers(5, 40),), {"grid": "ceil(x.shape[0] / 2)", "block": (32, 2)}
    ),
    KernelCase("normed", NORMED, normed, (numbers(3, 70), numbers(70), 1e-5), NORM),
    KernelCase("histogram", HISTOGRAM, histogram, (COUNTED,), {"grid": 1, "block": 64}),
    KernelCase("warp_sum", WARP_SUM, warp_sum, (numbers(128),), {"grid": 2, "block": 64}),
    KernelCase("fours", FOURS, double, (numbers(67),), {"grid": 1, "block": 32}),
    KernelCase("sides", SIDES, sides, (numbers(70), 5), {**OF_32, "constants": {"K": "k"}}),
    KernelCase("locked", LOCKED, total, (numbers(64),), {"grid": 1, "block": 64}),
    KernelCase("doubled", DOUBLED, total, (numbers(64, dtype=torch.float64),), {"grid": 1, "block": 64}),
    KernelCase("balloted", BALLOTED, positive, (numbers(2, 40),), {"grid": 2, "block": 32}),
    KernelCase("returned", RETURNED, first_added, (numbers(40),), OF_32),
    KernelCase("strided", STRIDED, double, (numbers(6, 5).t(),), {"grid": 2, "block": 4}),
    KernelCase("constant", CONSTANT, smoothed, (numbers(30),), OF_32),
    KernelCase("structs", STRUCTS, largest, (numbers(2, 100),), {"grid": 2, "block": 64}),
    KernelCase("last_block", LAST_BLOCK, partial_sums, (numbers(32),), {"grid": 4, "block": 32}),
    KernelCase(
        "half_softmax",
        SOFTMAX,
        softmax,
        (numbers(5, 40, dtype=torch.float16),),
        {"grid": "ceil(x.shape[0] / 2)", "block": (32, 2), "dtypes": [torch.float16]},
    ),
    KernelCase(
        "bfloat16_norm",
        NORMED,
        normed,
        (numbers(3, 70, dtype=torch.bfloat16), numbers(70, dtype=torch.bfloat16), 1e-5),
        {**NORM, "dtypes": [torch.bfloat16]},
    ),
    KernelCase(
        "double_product", PRODUCT, product, (numbers(9, 13).double(), numbers(13, 10).double()), PRODUCT_TILES
    ),
    KernelCase("long_rows", REDUCED, row_sums, (numbers(1, 1000),), {**ROWS, "block": 128, "shared": 512}),
    KernelCase("one_row", TRANSPOSED, transposed, (numbers(1, 33),), TILES),
]
WITH_NVIDIA = [
    KernelCase("halves", HALVES, double, (numbers(64, dtype=torch.float16),), {"grid": 1, "block": 32})
]
"""Kernels that need NVIDIA's headers."""


# ---- Wrong kernels: a right one with a line changed, and the cause.


def changed(
    right: str, name: str, cause: str, before: str, after: str, launch: dict[str, Any] | None = None
) -> KernelCase:
    case = next(each for each in RIGHT if each.name == right)
    return with_fault(case, name, cause, before, after, launch)


RACES = [
    changed("reduced", "no_first_barrier", "race", "__syncthreads();  // first", ""),
    changed("reduced", "no_barrier_in_loop", "race", "__syncthreads();  // each", ""),
    changed("scanned", "scan_without_barrier", "race", "__syncthreads();  // step", ""),
    changed("scanned", "scan_in_one_buffer", "race", "from = 1 - from, to = 1 - to;  // swap", "to = from;"),
    changed("transposed", "transpose_without_barrier", "race", "__syncthreads();  // loaded", ""),
    changed("product", "tiles_not_loaded", "race", "__syncthreads();  // loaded", ""),
    changed("product", "tiles_still_used", "race", "__syncthreads();  // used", ""),
    changed("stencil", "halo_without_barrier", "race", "__syncthreads();  // loaded", ""),
    changed("normed", "warps_without_barrier", "race", "__syncthreads();  // all warps", ""),
    changed("normed", "scale_without_barrier", "race", "__syncthreads();  // scaled", ""),
    changed("histogram", "plain_count", "race", "atomicAdd(&counts[x[i]], 1)", "counts[x[i]] += 1"),
    changed("histogram", "read_before_counted", "race", "__syncthreads();  // counted", ""),
    changed("histogram", "zeros_without_barrier", "race", "__syncthreads();  // zeros", ""),
    # As in "warp-synchronous programming", which Volta ended.
    changed("warp_sum", "without_syncwarp", "race", "__syncwarp();  // written", ""),
    changed("warp_sum", "read_after_write", "race", "__syncwarp();  // read all", ""),
    changed("locked", "lock_without_fence", "race", "__threadfence_block();  // release", ""),
    changed("last_block", "no_fence_before_count", "race", "__threadfence();  // publish", ""),
    changed(
        "added", "two_blocks_one_element", "race", "y[i] = x[i] + other[i]", "y[i % 32] = x[i] + other[i]"
    ),
    changed(
        "reduced",
        "all_threads_write",
        "race",
        "if (threadIdx.x == 0) y[row] = partial[0];",
        "y[row] = partial[0] + threadIdx.x;",
    ),
]
OUTSIDE = [
    changed("added", "no_bounds", "out-of-bounds", "if (i < y.numel()) ", ""),
    changed("added", "off_by_one", "out-of-bounds", "i < y.numel()", "i <= y.numel()"),
    changed("added", "negative_index", "out-of-bounds", "x[i] +", "x[i - 1] +"),
    changed("reduced", "too_little_shared", "out-of-bounds", "// own", "", {"shared": "16 * 4"}),
    changed("reduced", "no_shared", "out-of-bounds", "// own", "", {"shared": 0}),
    changed("transposed", "tile_too_narrow", "out-of-bounds", "tile[16][17]", "tile[16][15]"),
    changed("transposed", "rows_not_tested", "out-of-bounds", "if (i < columns && j < rows) ", ""),
    changed("product", "inner_not_tested", "out-of-bounds", "i < rows && k < inner ?", "i < rows ?"),
    changed("stencil", "halo_beyond", "out-of-bounds", "i + 1 < n ? x[i + 1]", "i <= n ? x[i + 1]"),
    changed("fours", "vector_beyond", "out-of-bounds", "if (i + 3 < n) {", "if (i < n) {"),
    changed("histogram", "bin_beyond", "out-of-bounds", "counts[x[i]]", "counts[x[i] + 8]"),
    changed("sides", "window_too_short", "out-of-bounds", "T window[K];", "T window[K - 1];"),
    changed(
        "strided",
        "strides_ignored",
        "out-of-bounds",
        "x(i, j) *",
        "x.data[i * x.stride(0) + j * x.stride(1) * 2] *",
    ),
    changed(
        "constant",
        "recursion",
        "out-of-bounds",
        "const int i = threadIdx.x,",
        "volatile char deep[300000]; deep[0] = 1; const int i = threadIdx.x + deep[0] - 1,",
    ),
    changed("added", "null_pointer", "out-of-bounds", "x[i] +", "*(const T*)nullptr +"),
]
UNWRITTEN = [
    changed("added", "result_not_written", "uninitialized", "i < y.numel()", "i < y.numel() - 3"),
    changed("reduced", "adds_to_result", "uninitialized", "y[row] = partial[0]", "y[row] += partial[0]"),
    changed("histogram", "bins_not_zeroed", "uninitialized", "counts[threadIdx.x] = 0;  // zero", ";"),
    changed(
        "stencil",
        "no_halo",
        "uninitialized",
        "if (threadIdx.x == 31) held[33]",
        "if (threadIdx.x == 32) held[33]",
    ),
    changed("added", "grid_too_small", "uninitialized", "// element", "", {"grid": "x.numel // 32"}),
    changed(
        "normed",
        "one_warp_silent",
        "uninitialized",
        "if (lane == 0) sums[warp] = sum;",
        "if (threadIdx.x == 0) sums[0] = sum;",
    ),
]
DIVERGENT = [
    changed(
        "reduced",
        "barrier_in_condition",
        "divergent-barrier",
        "// fold\n    __syncthreads();  // each",
        "\n    if (threadIdx.x < half) __syncthreads();",
    ),
    KernelCase(
        "uneven_trips",
        PRODUCT.replace("first < inner;", "first < inner - (threadIdx.x == 0 ? 8 : 0);"),
        product,
        (numbers(8, 16), numbers(16, 8)),
        PRODUCT_TILES,
        "divergent-barrier",
    ),
    changed(
        "transposed",
        "two_barriers",
        "divergent-barrier",
        "__syncthreads();  // loaded",
        "if (threadIdx.x < 8) __syncthreads();\n  else __syncthreads();",
    ),
    changed(
        "softmax",
        "shuffle_in_condition",
        "divergent-barrier",
        "sum = total(sum);",
        "if (threadIdx.x < 16) sum = total(sum);\n  __syncthreads();",
    ),
    changed(
        "normed",
        "mask_of_half_a_warp",
        "divergent-barrier",
        "__shfl_down_sync(0xffffffffu, sum, by);\n  if (lane == 0) sums[warp]",
        "__shfl_down_sync(0xffffu, sum, by);\n  if (lane == 0) sums[warp]",
    ),
    changed(
        "stencil",
        "barrier_for_some",
        "divergent-barrier",
        "__syncthreads();  // loaded",
        "if (threadIdx.x < 20) __syncthreads();",
    ),
]
OTHER = [
    changed("fours", "odd_start", "misaligned", "x.data + i)", "x.data + i + 1)"),
    KernelCase("slice_as_fours", FOURS, double, (numbers(65)[1:],), {"grid": 1, "block": 32}, "misaligned"),
    changed(
        "sides",
        "wrong_cast",
        "misaligned",
        "T sum = 0;",
        "T sum = T(*(const double*)(const void*)(x.data + 1) * 0);",
    ),
    changed(
        "added",
        "no_step",
        "endless",
        "y[i] = x[i] + other[i];",
        "for (int j = 0; j < 4;) y[i] = x[i] + other[i];",
    ),
    changed("reduced", "never_zero", "endless", "half > 0; half /= 2", "half >= 0; half /= 2"),
    changed(
        "histogram",
        "flag_never_set",
        "endless",
        "// counted",
        "\n  while (((volatile int*)counts)[0] >= 0) {}",
    ),
    changed(
        "added", "writes_its_input", "mutates-input", "y[i] = x[i]", "const_cast<T&>(x[i]) = 0, y[i] = x[i]"
    ),
    changed(
        "reduced",
        "sums_into_input",
        "mutates-input",
        "float sum = 0;",
        "float sum = 0; ((float*)x.data)[0] = 1;",
    ),
    changed("added", "assertion", "raises", "y[i] =", "assert(i < 5), y[i] ="),
    changed("added", "division", "undefined", "x[i] + other[i]", "x[i] + other[i] + 1 / int(threadIdx.x)"),
]
WRONG: Sequence[KernelCase] = [*RACES, *OUTSIDE, *UNWRITTEN, *DIVERGENT, *OTHER]
