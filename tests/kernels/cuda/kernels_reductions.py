"""CUDA kernels that reduce, scan and sort, as tutorials write them, and what is commonly wrong with them."""

from __future__ import annotations

import torch
from emulated_kernels import KernelCase, numbers, with_fault
from torch import Tensor

# ---- M. Harris, "Optimizing parallel reduction in CUDA": the seven steps.

INTERLEAVED = """
template <class T>
__global__ void KERNEL(Contiguous<const T, 1> in, Contiguous<T, 1> out) {
  __shared__ T sdata[128];
  unsigned int tid = threadIdx.x;
  unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
  sdata[tid] = i < in.numel() ? in[i] : T(0);
  __syncthreads();
  for (unsigned int s = 1; s < blockDim.x; s *= 2) {
    if (tid % (2 * s) == 0) {
      sdata[tid] += sdata[tid + s];
    }
    __syncthreads();
  }
  if (tid == 0) out[blockIdx.x] = sdata[0];
}
"""
STRIDED_INDEX = INTERLEAVED.replace(
    """    if (tid % (2 * s) == 0) {
      sdata[tid] += sdata[tid + s];
    }""",
    """    int index = 2 * s * tid;
    if (index < blockDim.x) {
      sdata[index] += sdata[index + s];
    }""",
)
SEQUENTIAL = INTERLEAVED.replace(
    "unsigned int s = 1; s < blockDim.x; s *= 2", "unsigned int s = blockDim.x / 2; s > 0; s >>= 1"
)
SEQUENTIAL = SEQUENTIAL.replace("tid % (2 * s) == 0", "tid < s")
FIRST_ADD = SEQUENTIAL.replace(
    "blockIdx.x * blockDim.x + threadIdx.x", "blockIdx.x * (blockDim.x * 2) + threadIdx.x"
).replace(
    "sdata[tid] = i < in.numel() ? in[i] : T(0);",
    "sdata[tid] = (i < in.numel() ? in[i] : T(0)) +\n"
    "    (i + blockDim.x < in.numel() ? in[i + blockDim.x] : T(0));",
)
UNROLLED = """
template <unsigned int blockSize>
__device__ void warpReduce(float* sdata, unsigned int tid) {
  float mine = sdata[tid];
  if (blockSize >= 64) { mine += sdata[tid + 32]; __syncwarp(); sdata[tid] = mine; __syncwarp(); }
  if (blockSize >= 32) { mine += tid < 16 ? sdata[tid + 16] : 0; __syncwarp(); sdata[tid] = mine;
      __syncwarp(); }
  if (blockSize >= 16) { mine += tid < 8 ? sdata[tid + 8] : 0; __syncwarp(); sdata[tid] = mine;
      __syncwarp(); }
  if (blockSize >= 8) { mine += tid < 4 ? sdata[tid + 4] : 0; __syncwarp(); sdata[tid] = mine; __syncwarp(); }
  if (blockSize >= 4) { mine += tid < 2 ? sdata[tid + 2] : 0; __syncwarp(); sdata[tid] = mine; __syncwarp(); }
  if (blockSize >= 2) { mine += tid < 1 ? sdata[tid + 1] : 0; __syncwarp(); sdata[tid] = mine; __syncwarp(); }
}
template <int BLOCK>
__global__ void KERNEL(Contiguous<const float, 1> in, Contiguous<float, 1> out) {
  extern __shared__ float sdata[];
  const int n = in.numel();
  unsigned int tid = threadIdx.x;
  unsigned int i = blockIdx.x * (BLOCK * 2) + tid;
  unsigned int gridSize = BLOCK * 2 * gridDim.x;
  sdata[tid] = 0;
  while (i < n) {
    sdata[tid] += in[i];
    if (i + BLOCK < n) sdata[tid] += in[i + BLOCK];
    i += gridSize;
  }
  __syncthreads();  // loaded
  if (BLOCK >= 512) { if (tid < 256) { sdata[tid] += sdata[tid + 256]; } __syncthreads(); }
  if (BLOCK >= 256) { if (tid < 128) { sdata[tid] += sdata[tid + 128]; } __syncthreads(); }
  if (BLOCK >= 128) { if (tid < 64) { sdata[tid] += sdata[tid + 64]; } __syncthreads(); }
  if (tid < 32) warpReduce<BLOCK>(sdata, tid);
  if (tid == 0) out[blockIdx.x] = sdata[0];
}
"""
VOLATILE = """
template <unsigned int blockSize>
__device__ void warpReduce(volatile float* sdata, unsigned int tid) {
  if (blockSize >= 64) sdata[tid] += sdata[tid + 32];  // volatile
  if (blockSize >= 32) sdata[tid] += sdata[tid + 16];
  if (blockSize >= 16) sdata[tid] += sdata[tid + 8];
  if (blockSize >= 8) sdata[tid] += sdata[tid + 4];
  if (blockSize >= 4) sdata[tid] += sdata[tid + 2];
  if (blockSize >= 2) sdata[tid] += sdata[tid + 1];
}
""" + UNROLLED[UNROLLED.index("template <int BLOCK>") :]

# ---- Reductions by shuffles.

BLOCK_REDUCE = """
__inline__ __device__ float warpReduceSum(float val) {
  for (int offset = warpSize / 2; offset > 0; offset /= 2)
    val += __shfl_down_sync(0xffffffff, val, offset);
  return val;
}
__inline__ __device__ float blockReduceSum(float val) {
  static __shared__ float shared[32];
  int lane = threadIdx.x % warpSize;
  int wid = threadIdx.x / warpSize;
  val = warpReduceSum(val);
  if (lane == 0) shared[wid] = val;
  __syncthreads();  // warps
  val = (threadIdx.x < blockDim.x / warpSize) ? shared[lane] : 0;
  if (wid == 0) val = warpReduceSum(val);
  return val;
}
__global__ void KERNEL(Contiguous<const float, 1> in, Contiguous<float, 1> out) {
  float sum = 0;
  const int N = in.numel();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < N; i += blockDim.x * gridDim.x) {
    sum += in[i];
  }
  sum = blockReduceSum(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
"""
MEAN_VARIANCE = """
template <int NUM_WARPS>
__device__ float block_sum(float val, float* scratch) {
  #pragma unroll
  for (int mask = 16; mask >= 1; mask >>= 1) val += __shfl_xor_sync(~0u, val, mask, 32);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (lane == 0) scratch[warp] = val;
  __syncthreads();  // written
  float total = 0.f;
  #pragma unroll
  for (int w = 0; w < NUM_WARPS; ++w) total += scratch[w];
  __syncthreads();  // reused
  return total;
}
__global__ void __launch_bounds__(128) KERNEL(Contiguous<const float, 2> x, Contiguous<float, 1> mean,
    Contiguous<float, 1> var) {
  __shared__ float scratch[4];
  const int cols = x.size(1);
  const float* row = x.data + blockIdx.x * cols;
  float s = 0.f;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) s += row[c];
  const float mu = block_sum<4>(s, scratch) / cols;
  float q = 0.f;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) q += (row[c] - mu) * (row[c] - mu);
  const float v = block_sum<4>(q, scratch) / cols;
  if (threadIdx.x == 0) {
    mean[blockIdx.x] = mu;
    var[blockIdx.x] = v;
  }
}
"""
WELFORD = """
struct Welford {
  float mean, m2, count;
};
__device__ __forceinline__ Welford combine(const Welford& a, const Welford& b) {
  if (b.count == 0.f) return a;
  const float count = a.count + b.count, delta = b.mean - a.mean;
  return {a.mean + delta * (b.count / count), a.m2 + b.m2 + delta * delta * (a.count * b.count / count),
      count};
}
__device__ __forceinline__ Welford shuffled(const Welford& w, int by) {
  return {__shfl_down_sync(0xffffffffu, w.mean, by), __shfl_down_sync(0xffffffffu, w.m2, by),
          __shfl_down_sync(0xffffffffu, w.count, by)};
}
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 1> out) {
  __shared__ Welford parts[32];
  Welford mine = {0.f, 0.f, 0.f};
  for (int j = threadIdx.x; j < x.size(1); j += blockDim.x) {
    const float value = x(blockIdx.x, j);
    mine.count += 1.f;
    const float delta = value - mine.mean;
    mine.mean += delta / mine.count;
    mine.m2 += delta * (value - mine.mean);
  }
  for (int by = 16; by > 0; by >>= 1) mine = combine(mine, shuffled(mine, by));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) parts[warp] = mine;
  __syncthreads();  // parts
  if (warp == 0) {
    mine = lane < blockDim.x / 32 ? parts[lane] : Welford{0.f, 0.f, 0.f};  // rest
    for (int by = 16; by > 0; by >>= 1) mine = combine(mine, shuffled(mine, by));
    if (lane == 0) out[blockIdx.x] = mine.m2 / mine.count;
  }
}
"""
DOT = """
const int threadsPerBlock = 64;
__global__ void KERNEL(Contiguous<const float, 1> a, Contiguous<const float, 1> b, Contiguous<float, 1> c) {
  __shared__ float cache[threadsPerBlock];
  int tid = threadIdx.x + blockIdx.x * blockDim.x;
  int cacheIndex = threadIdx.x;
  float temp = 0;
  while (tid < a.numel()) {
    temp += a[tid] * b[tid];
    tid += blockDim.x * gridDim.x;
  }
  cache[cacheIndex] = temp;
  __syncthreads();
  int i = blockDim.x / 2;
  while (i != 0) {
    if (cacheIndex < i)
      cache[cacheIndex] += cache[cacheIndex + i];  // add
    __syncthreads();  // all
    i /= 2;
  }
  if (cacheIndex == 0) c[blockIdx.x] = cache[0];
}
"""
ARGMAX = """
__device__ __forceinline__ unsigned int ordered(float f) {
  unsigned int bits = __float_as_uint(f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<int64_t, 1> out) {
  __shared__ unsigned long long best;
  if (threadIdx.x == 0) best = 0ull;  // start
  __syncthreads();  // started
  const int cols = x.size(1);
  for (int j = threadIdx.x; j < cols; j += blockDim.x) {
    unsigned long long packed = (unsigned long long)ordered(x(blockIdx.x,
        j)) << 32 | (unsigned)(cols - 1 - j);
    atomicMax(&best, packed);
  }
  __syncthreads();  // done
  if (threadIdx.x == 0) out[blockIdx.x] = cols - 1 - (int)(best & 0xffffffffull);
}
"""
LAST_BLOCK_SUM = """
__device__ unsigned int retirementCount = 0;
__device__ volatile float g_partial[64];
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> out) {
  __shared__ float sdata[64];
  __shared__ bool amLast;
  const unsigned tid = threadIdx.x;
  const int i = blockIdx.x * blockDim.x + tid;
  sdata[tid] = i < x.numel() ? x[i] : 0.f;
  __syncthreads();
  for (int s = blockDim.x / 2; s > 0; s >>= 1) {
    if (tid < s) sdata[tid] += sdata[tid + s];
    __syncthreads();
  }
  if (tid == 0) {
    g_partial[blockIdx.x] = sdata[0];
    __threadfence();
    unsigned int ticket = atomicInc(&retirementCount, gridDim.x);
    amLast = (ticket == gridDim.x - 1);
  }
  __syncthreads();  // told
  if (amLast) {
    float sum = 0;
    for (int j = tid; j < gridDim.x; j += blockDim.x) sum += g_partial[j];
    sdata[tid] = sum;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s >>= 1) {
      if (tid < s) sdata[tid] += sdata[tid + s];
      __syncthreads();
    }
    if (tid == 0) {
      out[0] = sdata[0];
      retirementCount = 0;
    }
  }
}
"""

# ---- Scans and sorts.

BLELLOCH = """
__global__ void KERNEL(Contiguous<const float, 2> g_idata, Contiguous<float, 2> g_odata) {
  extern __shared__ float temp[];
  const int n = g_idata.size(1);
  int thid = threadIdx.x;
  int offset = 1;
  temp[2 * thid] = g_idata(blockIdx.x, 2 * thid);
  temp[2 * thid + 1] = g_idata(blockIdx.x, 2 * thid + 1);
  for (int d = n >> 1; d > 0; d >>= 1) {
    __syncthreads();  // up
    if (thid < d) {
      int ai = offset * (2 * thid + 1) - 1;
      int bi = offset * (2 * thid + 2) - 1;
      temp[bi] += temp[ai];
    }
    offset *= 2;
  }
  if (thid == 0) temp[n - 1] = 0;  // clear
  for (int d = 1; d < n; d *= 2) {
    offset >>= 1;
    __syncthreads();  // down
    if (thid < d) {
      int ai = offset * (2 * thid + 1) - 1;
      int bi = offset * (2 * thid + 2) - 1;
      float t = temp[ai];
      temp[ai] = temp[bi];
      temp[bi] += t;
    }
  }
  __syncthreads();  // scanned
  g_odata(blockIdx.x, 2 * thid) = temp[2 * thid];
  g_odata(blockIdx.x, 2 * thid + 1) = temp[2 * thid + 1];
}
"""
WARP_SCAN = """
__device__ int warp_inclusive(int value, int lane) {
#pragma unroll
  for (int delta = 1; delta < 32; delta <<= 1) {
    int other = __shfl_up_sync(0xffffffff, value, delta);
    if (lane >= delta) value += other;  // lane
  }
  return value;
}
__global__ void KERNEL(Contiguous<const int64_t, 1> x, Contiguous<int64_t, 1> y) {
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int value = threadIdx.x < x.numel() ? (int)x[threadIdx.x] : 0;
  value = warp_inclusive(value, lane);
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();  // sums
  if (warp == 0) {
    int sum = lane < blockDim.x / 32 ? warp_sums[lane] : 0;
    sum = warp_inclusive(sum, lane);
    warp_sums[lane] = sum;
  }
  __syncthreads();  // offsets
  if (warp > 0) value += warp_sums[warp - 1];
  if (threadIdx.x < x.numel()) y[threadIdx.x] = value;
}
"""
NAIVE_SCAN = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 2> y) {
  __shared__ float XY[64];
  int i = threadIdx.x;
  XY[i] = x(blockIdx.x, i);
  for (unsigned int stride = 1; stride < blockDim.x; stride *= 2) {
    __syncthreads();
    float temp = 0.f;
    if (i >= stride) temp = XY[i] + XY[i - stride];
    __syncthreads();  // write after read
    if (i >= stride) XY[i] = temp;
  }
  y(blockIdx.x, i) = XY[i];
}
"""
BITONIC = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 2> y) {
  extern __shared__ float shared[];
  const unsigned int tid = threadIdx.x, n = blockDim.x;
  shared[tid] = x(blockIdx.x, tid);
  __syncthreads();
  for (unsigned int k = 2; k <= n; k *= 2) {
    for (unsigned int j = k / 2; j > 0; j /= 2) {
      unsigned int ixj = tid ^ j;
      if (ixj > tid) {
        if ((tid & k) == 0) {
          if (shared[tid] > shared[ixj]) { float t = shared[tid]; shared[tid] = shared[ixj];
              shared[ixj] = t; }
        } else {
          if (shared[tid] < shared[ixj]) { float t = shared[tid]; shared[tid] = shared[ixj];
              shared[ixj] = t; }
        }
      }
      __syncthreads();  // exchanged
    }
  }
  y(blockIdx.x, tid) = shared[tid];
}
"""
ODD_EVEN = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ float s[100];
  const int n = x.numel(), t = threadIdx.x;
  for (int i = t; i < n; i += blockDim.x) s[i] = x[i];
  __syncthreads();
  for (int phase = 0; phase < n; ++phase) {
    const int left = 2 * t + (phase & 1);
    if (left + 1 < n && s[left] > s[left + 1]) {  // pair
      const float swap = s[left];
      s[left] = s[left + 1];
      s[left + 1] = swap;
    }
    __syncthreads();  // phase
  }
  for (int i = t; i < n; i += blockDim.x) y[i] = s[i];
}
"""
RADIX_PASS = """
#define RADIX_BITS 4
#define RADIX (1 << RADIX_BITS)
__global__ void KERNEL(Contiguous<const int, 1> keys, int shift, Contiguous<int, 1> sorted) {
  __shared__ unsigned int counts[RADIX];
  __shared__ unsigned int starts[RADIX];
  const int n = keys.numel();
  for (int d = threadIdx.x; d < RADIX; d += blockDim.x) counts[d] = 0;
  __syncthreads();  // cleared
  for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&counts[(keys[i] >> shift) & (RADIX - 1)], 1u);
  __syncthreads();  // counted
  if (threadIdx.x == 0) {
    unsigned int running = 0;
    for (int d = 0; d < RADIX; ++d) {
      starts[d] = running;
      running += counts[d];
    }
  }
  __syncthreads();  // started
  if (threadIdx.x < RADIX) {
    unsigned int at = starts[threadIdx.x];
    for (int i = 0; i < n; ++i)
      if (((keys[i] >> shift) & (RADIX - 1)) == threadIdx.x) sorted[at++] = keys[i];
  }
}
"""
RANKED = """
__global__ void KERNEL(Contiguous<const float, 2> x, int k, Contiguous<float, 2> values,
    Contiguous<int64_t, 2> indices) {
  extern __shared__ unsigned char raw[];
  const int n = x.size(1);
  float* held = reinterpret_cast<float*>(raw);
  float* best = held + n;
  int* where = reinterpret_cast<int*>(best + blockDim.x);
  for (int j = threadIdx.x; j < n; j += blockDim.x) held[j] = x(blockIdx.x, j);
  __syncthreads();
  for (int rank = 0; rank < k; ++rank) {
    float top = -INFINITY;
    int at = -1;
    for (int j = threadIdx.x; j < n; j += blockDim.x)
      if (held[j] > top) { top = held[j]; at = j; }
    best[threadIdx.x] = top;
    where[threadIdx.x] = at;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s >>= 1) {
      if (threadIdx.x < s && best[threadIdx.x + s] > best[threadIdx.x]) {
        best[threadIdx.x] = best[threadIdx.x + s];
        where[threadIdx.x] = where[threadIdx.x + s];
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      values(blockIdx.x, rank) = best[0];
      indices(blockIdx.x, rank) = where[0];
      held[where[0]] = -INFINITY;
    }
    __syncthreads();  // next
  }
}
"""


def per_block(x: Tensor, size: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.numel() % size))
    return padded.view(-1, size).sum(1)


def sums_of_128(x: Tensor) -> Tensor:
    return per_block(x, 128)


def sums_of_256(x: Tensor) -> Tensor:
    return per_block(x, 256)


def two_blocks(x: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % 512)).view(-1, 2, 256)
    return blocks.sum((0, 2))


def strided_blocks(x: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % 256)).view(-1, 2, 128)
    return blocks.sum((0, 2))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(1), x.var(1, correction=0)


def variance(x: Tensor) -> Tensor:
    return x.var(1, correction=0)


def dots(a: Tensor, b: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(a * b, (0, -a.numel() % 128)).view(-1, 2, 64)
    return blocks.sum((0, 2))


def argmax(x: Tensor) -> Tensor:
    return x.argmax(1)


def whole_sum(x: Tensor) -> Tensor:
    return x.sum(0, keepdim=True)


def before(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x.cumsum(1)[:, :-1], (1, 0))


def running(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def ordered_rows(x: Tensor) -> Tensor:
    return x.sort(-1).values


def by_digit(x: Tensor, shift: int) -> Tensor:
    return x[torch.argsort((x >> shift) & 15, stable=True)]


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = x.topk(k, 1)
    return found.values, found.indices


OF_128 = {"grid": "ceil(x.numel / 128)", "block": 128}
TWO_OF_128 = {"grid": 2, "block": 128, "shared": "128 * 4", "constants": {"BLOCK": "128"}}
KEYS = (torch.arange(100, dtype=torch.int32) * 7919) % 4096
TOP = {"grid": "x.shape[0]", "block": 32, "shared": "(x.shape[1] + 64) * 4"}

RIGHT = [
    KernelCase("interleaved", INTERLEAVED, sums_of_128, (numbers(300),), OF_128),
    KernelCase("strided_index", STRIDED_INDEX, sums_of_128, (numbers(300).double(),), OF_128),
    KernelCase("sequential", SEQUENTIAL, sums_of_128, (numbers(256),), OF_128),
    KernelCase(
        "first_add", FIRST_ADD, sums_of_256, (numbers(700),), {"grid": "ceil(x.numel / 256)", "block": 128}
    ),
    KernelCase("unrolled", UNROLLED, two_blocks, (numbers(1100),), TWO_OF_128),
    KernelCase("block_reduce", BLOCK_REDUCE, strided_blocks, (numbers(777),), {"grid": 2, "block": 128}),
    KernelCase(
        "mean_variance", MEAN_VARIANCE, moments, (numbers(3, 200),), {"grid": "x.shape[0]", "block": 128}
    ),
    KernelCase("welford", WELFORD, variance, (numbers(3, 150),), {"grid": "x.shape[0]", "block": 64}),
    KernelCase("dot", DOT, dots, (numbers(300), numbers(300)), {"grid": 2, "block": 64}),
    KernelCase("packed_argmax", ARGMAX, argmax, (numbers(3, 90),), {"grid": "x.shape[0]", "block": 64}),
    KernelCase(
        "last_block_sum",
        LAST_BLOCK_SUM,
        whole_sum,
        (numbers(300),),
        {"grid": "ceil(x.numel / 64)", "block": 64},
    ),
    KernelCase(
        "blelloch",
        BLELLOCH,
        before,
        (numbers(2, 64),),
        {"grid": "x.shape[0]", "block": 32, "shared": "64 * 4"},
    ),
    KernelCase("warp_scan", WARP_SCAN, running, (torch.arange(100) % 7,), {"grid": 1, "block": 128}),
    KernelCase("naive_scan", NAIVE_SCAN, running, (numbers(2, 64),), {"grid": "x.shape[0]", "block": 64}),
    KernelCase(
        "bitonic",
        BITONIC,
        ordered_rows,
        (numbers(2, 64),),
        {"grid": "x.shape[0]", "block": 64, "shared": "64 * 4"},
    ),
    KernelCase("odd_even", ODD_EVEN, ordered_rows, (numbers(75),), {"grid": 1, "block": 64}),
    KernelCase("radix_pass", RADIX_PASS, by_digit, (KEYS, 4), {"grid": 1, "block": 64}),
    KernelCase("ranked", RANKED, top, (numbers(2, 50), 3), TOP),
]
_CASES = {each.name: each for each in RIGHT}


def wrong(right: str, name: str, cause: str, before: str, after: str, **launch: object) -> KernelCase:
    return with_fault(_CASES[right], name, cause, before, after, launch)


WRONG = [
    wrong("interleaved", "last_step_missing", "wrong values", "s < blockDim.x;", "s < blockDim.x / 2;"),
    wrong(
        "interleaved",
        "fold_too_far",
        "race",
        "if (tid % (2 * s) == 0) {",
        "if (tid % s == 0 && tid + s < blockDim.x) {",
    ),
    wrong(
        "strided_index",
        "index_beyond_half",
        "out-of-bounds",
        "if (index < blockDim.x) {",
        "if (index < 2 * blockDim.x) {",
    ),
    wrong(
        "sequential",
        "barrier_within_fold",
        "divergent-barrier",
        "    if (tid < s) {",
        "    if (tid < s) { __syncthreads();",
    ),
    wrong("sequential", "less_or_equal", "out-of-bounds", "if (tid < s) {", "if (tid <= s) {"),
    wrong(
        "first_add", "tail_not_tested", "out-of-bounds", "i + blockDim.x < in.numel() ?", "i < in.numel() ?"
    ),
    wrong("unrolled", "load_without_barrier", "race", "__syncthreads();  // loaded", ""),
    KernelCase("warp_synchronous_volatile", VOLATILE, two_blocks, (numbers(1100),), TWO_OF_128, "race"),
    wrong("unrolled", "shared_of_half_the_block", "out-of-bounds", "// loaded", "", shared="64 * 4"),
    wrong("unrolled", "sum_not_started", "uninitialized", "sdata[tid] = 0;", ""),
    wrong("block_reduce", "sums_of_warps_early", "race", "__syncthreads();  // warps", ""),
    wrong(
        "block_reduce",
        "every_lane_of_the_first_warp",
        "uninitialized",
        "(threadIdx.x < blockDim.x / warpSize) ? shared[lane] : 0",
        "shared[lane]",
    ),
    wrong(
        "block_reduce",
        "width_of_sixteen",
        "wrong values",
        "__shfl_down_sync(0xffffffff, val, offset)",
        "__shfl_down_sync(0xffffffff, val, offset, 16)",
    ),
    wrong("block_reduce", "sum_of_no_start", "wrong values", "float sum = 0;", "float sum;"),
    wrong("mean_variance", "scratch_reused_early", "race", "__syncthreads();  // reused", ""),
    wrong("mean_variance", "warps_of_another_block", "uninitialized", "w < NUM_WARPS", "w < 4", block=64),
    wrong(
        "welford",
        "parts_of_the_rest",
        "uninitialized",
        "lane < blockDim.x / 32 ? parts[lane] : Welford{0.f, 0.f, 0.f};",
        "parts[lane];",
    ),
    wrong(
        "welford",
        "shuffle_of_the_first_half",
        "divergent-barrier",
        "if (warp == 0) {",
        "if (warp == 0 && lane < 16) {",
    ),
    wrong(
        "dot",
        "barrier_of_those_that_add",
        "divergent-barrier",
        "cache[cacheIndex] += cache[cacheIndex + i];  // add\n    __syncthreads();  // all",
        "{ cache[cacheIndex] += cache[cacheIndex + i]; __syncthreads(); }",
    ),
    wrong("dot", "never_halved", "endless", "i /= 2;", "i = (i + 1) / 2;"),
    wrong("packed_argmax", "not_started", "uninitialized", "best = 0ull;  // start", ";"),
    wrong(
        "packed_argmax",
        "maximum_by_hand",
        "race",
        "atomicMax(&best, packed);",
        "if (packed > best) best = packed;",
    ),
    wrong("last_block_sum", "no_fence_before_ticket", "race", "__threadfence();", ""),
    wrong("blelloch", "clear_without_barrier", "race", "__syncthreads();  // down", ""),
    wrong(
        "blelloch",
        "scan_of_twice_the_row",
        "out-of-bounds",
        "temp[2 * thid + 1] = g_idata",
        "temp[2 * thid + 1 + n] = g_idata",
    ),
    wrong("warp_scan", "lanes_wrap", "wrong values", "if (lane >= delta) value += other;", "value += other;"),
    wrong("warp_scan", "offsets_early", "race", "__syncthreads();  // offsets", ""),
    wrong("naive_scan", "scan_in_place", "race", "__syncthreads();  // write after read", ""),
    wrong("bitonic", "pair_of_the_next_block", "out-of-bounds", "tid ^ j;", "tid + j;"),
    wrong("bitonic", "both_threads_exchange", "race", "if (ixj > tid) {", "if (true) {"),
    wrong(
        "odd_even",
        "neighbour_behind_the_end",
        "uninitialized",
        "left + 1 < n && s[left]",
        "left < n && s[left]",
    ),
    wrong("odd_even", "phase_without_barrier", "race", "__syncthreads();  // phase", ""),
    wrong("radix_pass", "counts_not_cleared", "race", "__syncthreads();  // cleared", ""),
    wrong(
        "radix_pass",
        "digit_too_wide",
        "out-of-bounds",
        "atomicAdd(&counts[(keys[i] >> shift) & (RADIX - 1)], 1u)",
        "atomicAdd(&counts[keys[i] >> shift], 1u)",
    ),
    wrong("ranked", "next_rank_early", "race", "__syncthreads();  // next", ""),
    wrong("ranked", "arrays_overlap", "race", "float* best = held + n;", "float* best = held + n - 8;"),
]
