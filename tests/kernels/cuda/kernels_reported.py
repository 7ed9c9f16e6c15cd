"""Faulty CUDA kernels in the manner of faults that people have reported; the code is ours, and small.

Each comment names the repository and the number of the report from which the idea comes.
"""

from __future__ import annotations

import torch
from emulated_kernels import KernelCase, numbers
from torch import Tensor


def weighted(x: Tensor, w: Tensor) -> Tensor:
    return x.sum() * w


def shares(x: Tensor) -> Tensor:
    return x / x.sum(1, keepdim=True)


def normal(x: Tensor) -> Tensor:
    return x.softmax(1)


def row_sums(x: Tensor) -> Tensor:
    return x.sum(1)


def whole_sum(x: Tensor) -> Tensor:
    return x.sum(0, keepdim=True)


def double(x: Tensor) -> Tensor:
    return x * 2


def pairs(x: Tensor) -> Tensor:
    return x[:, 1:].clone()


def counted(x: Tensor) -> Tensor:
    return x.new_zeros(8).index_add(0, x % 8, torch.ones_like(x))


def swapped(x: Tensor) -> Tensor:
    return x.view(-1, 2).flip(1).flatten()


def chosen(x: Tensor, at: Tensor) -> Tensor:
    return x[at]


def portions(x: Tensor) -> Tensor:
    return x / x.sum()


def of_eights(x: Tensor) -> Tensor:
    return x[::8].sum(0, keepdim=True)


def by_sixteens(x: Tensor) -> Tensor:
    return x.view(-1, 16).sum(1)


# ORNL/HeCBench#253: a loop over tiles in shared memory waits after each load, and not after each use.
TILES = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<const float, 1> w, Contiguous<float, 1> y) {
  __shared__ float tile[32];
  const int i = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  for (int first = 0; first < x.numel(); first += 32) {
    tile[threadIdx.x] = first + threadIdx.x < x.numel() ? x[first + threadIdx.x] : 0;
    __syncthreads();
    for (int k = 0; k < 32; k++) sum += tile[k];
  }
  if (i < w.numel()) y[i] = sum * w[i];
}
"""
# ORNL/HeCBench#254: one thread writes a total into shared memory, and all read it at once.
TOTAL = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 2> y) {
  __shared__ float parts[4];
  __shared__ float total;
  float sum = 0;
  for (int j = threadIdx.x; j < x.size(1); j += 128) sum += x(blockIdx.x, j);
  for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) total = parts[0] + parts[1] + parts[2] + parts[3];
  for (int j = threadIdx.x; j < x.size(1); j += 128) y(blockIdx.x, j) = x(blockIdx.x, j) / total;
}
"""
# karpathy/llm.c#847: lanes of the first warp zero the sums of all warps,
# which these may have written already.
ZEROED_LATE = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 1> y) {
  __shared__ float block_acc[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) block_acc[lane] = 0;
  float sum = 0;
  for (int j = threadIdx.x; j < x.size(1); j += blockDim.x) sum += x(blockIdx.x, j);
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  if (lane == 0) block_acc[warp] = sum;
  __syncthreads();
  sum = block_acc[lane];
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
"""
# ggml-org/llama.cpp#26385: the reductions for maximum and sum use one buffer, one right after the other.
ONE_BUFFER = """
template <bool SUM> __device__ float block_reduce(float value, float* shared) {
  for (int by = 16; by > 0; by /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, value, by);
    value = SUM ? value + other : fmaxf(value, other);
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : SUM ? 0.f : -INFINITY;
  for (int by = 16; by > 0; by /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, value, by);
    value = SUM ? value + other : fmaxf(value, other);
  }
  return value;
}
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 2> y) {
  __shared__ float shared[32];
  const int j = threadIdx.x;
  const float mine = j < x.size(1) ? x(blockIdx.x, j) : -INFINITY;
  const float high = block_reduce<false>(mine, shared);
  const float power = __expf(mine - high), sum = block_reduce<true>(power, shared);
  if (j < x.size(1)) y(blockIdx.x, j) = power / sum;
}
"""
# NVIDIA/cuda-samples#398: lanes that a ballot left out are read by the shuffles that follow.
LEFT_OUT = """
__device__ float warpReduceSum(unsigned int mask, float mySum) {
  for (int offset = warpSize / 2; offset > 0; offset /= 2) mySum += __shfl_down_sync(mask, mySum, offset);
  return mySum;
}
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ float sdata[32];
  float sum = warpReduceSum(0xffffffffu, x[threadIdx.x]);
  if (threadIdx.x % 32 == 0) sdata[threadIdx.x / 32] = sum;
  __syncthreads();
  const unsigned int warps = blockDim.x / warpSize;
  const unsigned int ballot = __ballot_sync(0xffffffffu, threadIdx.x < warps);
  if (threadIdx.x < warps) {
    sum = warpReduceSum(ballot, sdata[threadIdx.x]);
    if (threadIdx.x == 0) y[0] = sum;
  }
}
"""
# NVIDIA/cub#154: a part of a warp shuffles with the mask of another part.
OTHER_MASK = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  const int lane = threadIdx.x % 32;
  float sum = x[threadIdx.x];
  if (lane < 16) {
    for (int by = 8; by > 0; by /= 2) sum += __shfl_down_sync(0x0000ffffu, sum, by, 16);
  } else {
    for (int by = 8; by > 0; by /= 2) sum += __shfl_down_sync(0x0000ffffu, sum, by, 16);
  }
  if (lane % 16 == 0) y[threadIdx.x / 16] = sum;
}
"""
# kokkos/kokkos#1958: the mask of a part of a warp is shifted by the number of the part within another count.
SHIFTED_MASK = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  const int width = 16, part = threadIdx.x / width % 2;
  float sum = x[threadIdx.x];
  const unsigned mask = ((1u << width) - 1) << (threadIdx.x % (32 / width)) * width;
  for (int by = width / 2; by > 0; by /= 2) sum += __shfl_down_sync(mask, sum, by, width);
  if (threadIdx.x % width == 0) y[threadIdx.x / width] = sum;
}
"""
# apache/tvm#8540: two halves are read as one number, from an odd offset.
ODD_HALVES = """
__global__ void KERNEL(Contiguous<const Half, 2> x, Contiguous<Half, 2> y) {
  const int row = threadIdx.x;
  if (row < x.size(0)) ((uint1*)(y.data + row * 2))[0] = ((uint1*)(x.data + row * 3 + 1))[0];
}
"""
# ggml-org/llama.cpp#18799: 16 bytes are copied at once into an array that is aligned to 8.
WIDE_COPY = """
__device__ void copy_16(void* to, const void* from) { *(int4*)to = *(const int4*)from; }
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ float2 held[65];
  copy_16(&held[2 * threadIdx.x + 1], x.data + 4 * threadIdx.x);
  for (int k = 0; k < 4; k++) y[4 * threadIdx.x + k] = 2 * ((const float*)&held[2 * threadIdx.x + 1])[k];
}
"""
# lightseekorg/tokenspeed#683: rows are read by fours, and their length is no multiple of four.
ODD_ROWS = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 1> y) {
  __shared__ float total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  const int n = x.size(1);
  const float* row = x.data + blockIdx.x * n;
  float sum = 0;
  for (int j = threadIdx.x; j < n / 4; j += blockDim.x) {
    const float4 v = reinterpret_cast<const float4*>(row)[j];
    sum += v.x + v.y + v.z + v.w;
  }
  for (int j = n / 4 * 4 + threadIdx.x; j < n; j += blockDim.x) sum += row[j];
  atomicAdd(&total, sum);
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}
"""
# xlite-dev/LeetCUDA#251: a fence stands where blocks would have to wait for one another.
FENCE_FOR_BARRIER = """
__device__ float total;
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 2> y) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  float sum = x[i];
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  if (threadIdx.x == 0) atomicAdd(&total, sum);
  __threadfence();
  y[i] = x[i] / total;
}
"""
# tile-ai/tilelang#1026: a barrier stands in the branch of the even threads.
EVEN_BARRIER = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ float held[32];
  const int t = threadIdx.x;
  held[t] = x[t];
  __syncthreads();
  if (t % 2 == 0) {
    const float a = held[t], b = held[t ^ 1];
    __syncthreads();
    held[t ^ 1] = a, held[t] = b;
  }
  __syncthreads();
  y[t] = held[t];
}
"""
# tpruvot/ccminer#75: lanes of a warp hand values on in shared memory, without __syncwarp.
HANDED_ON = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ float level[32];
  const int lane = threadIdx.x;
  level[lane] = x[lane];
  if (lane % 16 == 0) level[lane] += level[lane + 8];
  if (lane == 0) y[0] = level[0] + level[16];
}
"""
# alicevision/popsift#82: bins are zeroed and counted into without a barrier between.
ZEROES = """
__global__ void KERNEL(Contiguous<const int64_t, 1> x, Contiguous<int64_t, 1> y) {
  __shared__ int bins[8];
  for (int b = threadIdx.x; b < 8; b += blockDim.x) bins[b] = 0;
  for (int i = threadIdx.x; i < x.numel(); i += blockDim.x) atomicAdd(&bins[x[i] % 8], 1);
  __syncthreads();
  for (int b = threadIdx.x; b < 8; b += blockDim.x) y[b] = bins[b];
}
"""
# m0at/rvllm#1: a block of fewer threads than a warp shuffles as if it were whole.
SMALL_BLOCK = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 1> y) {
  float sum = x(blockIdx.x, threadIdx.x);
  for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
"""
# microsoft/onnxruntime#28107: the offset of a row is computed in too few bits.
NARROW_OFFSET = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<const int64_t, 1> at, Contiguous<float,
    2> y) {
  const int16_t offset = int16_t(at[blockIdx.x] * x.size(1));
  for (int j = threadIdx.x; j < x.size(1); j += blockDim.x) y(blockIdx.x, j) = x[offset + j];
}
"""
# yelhousni/zprize-GPU-MSM-harness#1: values are posted in shared memory in each round,
# with one barrier a round.
POSTED = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 1> y) {
  __shared__ float posted[64];
  float best = 0;
  for (int row = 0; row < x.size(0); row++) {
    posted[threadIdx.x] = x(row, threadIdx.x);
    __syncthreads();
    float sum = 0;
    for (int k = 0; k < 64; k++) sum += posted[k];
    if (threadIdx.x == row) best = sum;
  }
  if (threadIdx.x < y.numel()) y[threadIdx.x] = best;
}
"""
# numba/numba#2655: some threads jump over a barrier.
JUMPED = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ float held[32];
  const int t = threadIdx.x;
  float mine = x[t];
  if (t < 14 && mine < 1e30f) goto end;
  held[t] = mine;
  __syncthreads();
  mine = held[t];
end:
  y[t] = 2 * mine;
  held[t] = mine;
  __syncthreads();
}
"""

ROWS = {"grid": "x.shape[0]", "block": 128}
ONE = {"grid": 1, "block": 32}
RESHAPED = numbers(4, 3, dtype=torch.float16)

WRONG = [
    KernelCase("tile_in_use", TILES, weighted, (numbers(80), numbers(40)), {"grid": 2, "block": 32}, "race"),
    KernelCase("total_at_once", TOTAL, shares, (numbers(2, 150).abs(),), ROWS, "race"),
    KernelCase("zeroed_late", ZEROED_LATE, row_sums, (numbers(2, 150),), ROWS, "race"),
    KernelCase("one_buffer", ONE_BUFFER, normal, (numbers(2, 100),), ROWS, "race"),
    KernelCase(
        "lanes_left_out", LEFT_OUT, whole_sum, (numbers(128),), {"grid": 1, "block": 128}, "divergent-barrier"
    ),
    KernelCase("mask_of_the_other_half", OTHER_MASK, by_sixteens, (numbers(32),), ONE, "divergent-barrier"),
    KernelCase("mask_shifted_too_far", SHIFTED_MASK, by_sixteens, (numbers(32),), ONE, "divergent-barrier"),
    KernelCase("odd_halves", ODD_HALVES, pairs, (RESHAPED,), ONE, "misaligned"),
    KernelCase("wide_copy", WIDE_COPY, double, (numbers(64),), {"grid": 1, "block": 16}, "misaligned"),
    KernelCase("odd_rows", ODD_ROWS, row_sums, (numbers(2, 70),), ROWS, "misaligned"),
    KernelCase(
        "fence_for_barrier",
        FENCE_FOR_BARRIER,
        portions,
        (numbers(2, 32).abs(),),
        {"grid": 2, "block": 32},
        "race",
    ),
    KernelCase("even_barrier", EVEN_BARRIER, swapped, (numbers(32),), ONE, "divergent-barrier"),
    KernelCase("handed_on", HANDED_ON, of_eights, (numbers(32),), ONE, "race"),
    KernelCase(
        "zeroed_and_counted", ZEROES, counted, (torch.arange(100) % 23,), {"grid": 1, "block": 64}, "race"
    ),
    KernelCase(
        "small_block", SMALL_BLOCK, row_sums, (numbers(2, 16),), {"grid": 2, "block": 16}, "divergent-barrier"
    ),
    KernelCase(
        "narrow_offset",
        NARROW_OFFSET,
        chosen,
        (numbers(1100, 32), torch.tensor([3, 1090])),
        {"grid": 2, "block": 32},
        "out-of-bounds",
    ),
    KernelCase("posted_early", POSTED, row_sums, (numbers(3, 64),), {"grid": 1, "block": 64}, "race"),
    KernelCase("barrier_jumped_over", JUMPED, double, (numbers(32),), ONE, "divergent-barrier"),
]
