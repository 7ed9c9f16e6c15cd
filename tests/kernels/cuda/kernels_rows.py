"""CUDA kernels of neural networks and of counting, as tutorials write them, and their usual faults."""

from __future__ import annotations

import math

import torch
from emulated_kernels import KernelCase, numbers, with_fault
from torch import Tensor
from torch.nn import functional

ONLINE_SOFTMAX = """
struct __align__(8) MD { float m; float d; };
__device__ __forceinline__ MD reduce_md_op(MD a, MD b) {
  bool a_bigger = a.m > b.m;
  MD bigger_m = a_bigger ? a : b;
  MD smaller_m = a_bigger ? b : a;
  MD res;
  res.d = bigger_m.d + smaller_m.d * __expf(smaller_m.m - bigger_m.m);
  res.m = bigger_m.m;
  return res;
}
template <int THREADBLOCK_SIZE>
__launch_bounds__(THREADBLOCK_SIZE) __global__ void KERNEL(Contiguous<const float, 2> x,
    Contiguous<float, 2> y) {
  __shared__ MD parts[THREADBLOCK_SIZE];
  const int V = x.size(1);
  const float* in = x.data + blockIdx.x * V;
  float* out = y.data + blockIdx.x * V;
  MD md_partial = {-FLT_MAX, 0.0f};  // start
  for (int elem_id = threadIdx.x; elem_id < V; elem_id += THREADBLOCK_SIZE) {
    MD new_elem = {in[elem_id], 1.0f};
    md_partial = reduce_md_op(md_partial, new_elem);
  }
  parts[threadIdx.x] = md_partial;
  __syncthreads();  // parts
  for (int s = THREADBLOCK_SIZE / 2; s > 0; s >>= 1) {
    if (threadIdx.x < s) parts[threadIdx.x] = reduce_md_op(parts[threadIdx.x], parts[threadIdx.x + s]);
    __syncthreads();  // fold
  }
  const MD md_total = parts[0];
  const float d_total_inverse = __fdividef(1.0F, md_total.d);
  for (int elem_id = threadIdx.x; elem_id < V; elem_id += THREADBLOCK_SIZE)
    out[elem_id] = __expf(in[elem_id] - md_total.m) * d_total_inverse;
}
"""
LAYERNORM = """
#define FULL_MASK 0xffffffff
template <class T>
__global__ void KERNEL(Contiguous<const T, 2> x, Contiguous<const T, 1> gamma, Contiguous<const T,
    1> beta, double eps, Contiguous<T, 2> y) {
  __shared__ float s_mean, s_rstd;
  __shared__ float2 s_parts[32];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, n = x.size(1);
  const T* xi = x.data + blockIdx.x * n;
  float2 acc = make_float2(0.f, 0.f);
  for (int i = tid; i < n; i += blockDim.x) {
    const float v = static_cast<float>(xi[i]);
    acc.x += v;
    acc.y += v * v;
  }
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    acc.x += __shfl_xor_sync(FULL_MASK, acc.x, o);
    acc.y += __shfl_xor_sync(FULL_MASK, acc.y, o);
  }
  if (lane == 0) s_parts[warp] = acc;
  __syncthreads();  // parts
  if (tid == 0) {
    float2 all = s_parts[0];
    for (int w = 1; w < blockDim.x / 32; w++) all.x += s_parts[w].x, all.y += s_parts[w].y;
    s_mean = all.x / n;
    s_rstd = rsqrtf(all.y / n - s_mean * s_mean + float(eps));
  }
  __syncthreads();  // known
  for (int i = tid; i < n; i += blockDim.x)
    y[blockIdx.x * n + i] = T((static_cast<float>(xi[i]) - s_mean) * s_rstd * float(gamma[i])
        + float(beta[i]));
}
"""
RMSNORM_FOURS = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<const float, 1> w, double eps,
    Contiguous<float, 2> y) {
  __shared__ float total;
  const int d4 = x.size(1) / 4;
  const float4* row = reinterpret_cast<const float4*>(x.data + blockIdx.x * x.size(1));
  const float4* w4 = reinterpret_cast<const float4*>(w.data);
  float4* out = reinterpret_cast<float4*>(y.data + blockIdx.x * x.size(1));
  if (threadIdx.x == 0) total = 0.f;  // zero
  __syncthreads();  // zeroed
  float part = 0.f;
  for (int i = threadIdx.x; i < d4; i += blockDim.x) {
    const float4 v = row[i];
    part += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  atomicAdd(&total, part);  // add
  __syncthreads();  // added
  const float scale = rsqrtf(total / x.size(1) + float(eps));
  for (int i = threadIdx.x; i < d4; i += blockDim.x) {
    float4 v = row[i];
    const float4 g = __ldg(w4 + i);
    v.x *= scale * g.x;
    v.y *= scale * g.y;
    v.z *= scale * g.z;
    v.w *= scale * g.w;
    out[i] = v;
  }
}
"""
ATTENTION = """
template <int D, int BR>
__global__ void KERNEL(Contiguous<const float, 2> Q, Contiguous<const float, 2> K,
    Contiguous<const float, 2> V, Contiguous<float, 2> O) {
  extern __shared__ float sram[];
  float* Kj = sram;
  float* Vj = Kj + BR * D;
  float* S = Vj + BR * D;
  const int N = Q.size(0), tx = threadIdx.x;
  const int q = blockIdx.x * BR + tx;
  const float scale = 1.f / sqrtf((float)D);
  float m = -INFINITY, l = 0.f, acc[D];
  for (int k = 0; k < D; k++) acc[k] = 0.f;
  for (int j = 0; j < N; j += BR) {
    const int rows = min(BR, N - j);
    if (tx < rows)
      for (int k = 0; k < D; k++) {
        Kj[tx * D + k] = K[(j + tx) * D + k];
        Vj[tx * D + k] = V[(j + tx) * D + k];
      }
    __syncthreads();  // loaded
    if (q < N) {
      float row_m = m;
      for (int y = 0; y < rows; y++) {
        float sum = 0.f;
        for (int k = 0; k < D; k++) sum += Q[q * D + k] * Kj[y * D + k];
        sum *= scale;
        S[tx * BR + y] = sum;
        row_m = fmaxf(row_m, sum);
      }
      const float alpha = __expf(m - row_m);
      float row_l = 0.f;
      for (int k = 0; k < D; k++) acc[k] *= alpha;
      for (int y = 0; y < rows; y++) {
        const float p = __expf(S[tx * BR + y] - row_m);
        row_l += p;
        for (int k = 0; k < D; k++) acc[k] += p * Vj[y * D + k];
      }
      l = l * alpha + row_l;
      m = row_m;
    }
    __syncthreads();  // used
  }
  if (q < N)
    for (int k = 0; k < D; k++) O[q * D + k] = acc[k] / l;
}
"""
EMBEDDING = """
template <typename scalar_t>
__global__ void KERNEL(Contiguous<const int64_t, 1> ids, Contiguous<const scalar_t, 2> table,
    Contiguous<scalar_t, 2> out) {
  const int64_t token = blockIdx.x;
  const int dim = table.size(1);
  const int64_t id = ids[token];
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    out[token * dim + d] = (id >= 0 && id < table.size(0)) ? table[id * dim + d] : scalar_t(0);
  }
}
"""
EMBEDDING_GRAD = """
__global__ void KERNEL(Contiguous<const int64_t, 1> ids, Contiguous<const float, 2> outer, int rows,
    Contiguous<float, 2> out) {
  // One block for each row of the table, so that no two write the same.
  const int row = blockIdx.x;
  for (int d = threadIdx.x; d < outer.size(1); d += blockDim.x) {
    float sum = 0.f;
    for (int t = 0; t < ids.numel(); ++t)
      if (ids[t] == row) sum += outer(t, d);
    out(row, d) = sum;
  }
}
"""
ROPE = """
__global__ void KERNEL(Contiguous<const float, 3> x, Contiguous<float, 3> y) {
  const int seq = blockIdx.x, head = blockIdx.y, half = x.size(2) / 2;
  const int i = threadIdx.x;
  if (i >= half) return;
  float sn, cs;
  sincosf(seq * powf(10000.f, -2.f * i / x.size(2)), &sn, &cs);
  const float a = x(seq, head, i), b = x(seq, head, i + half);
  y(seq, head, i) = a * cs - b * sn;
  y(seq, head, i + half) = b * cs + a * sn;
}
"""
CROSS_ENTROPY = """
__global__ void KERNEL(Contiguous<const float, 2> logits, Contiguous<const int64_t, 1> target,
    Contiguous<float, 1> loss) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y, C = logits.size(1);
  if (row >= logits.size(0)) return;
  const float* x = &logits(row, 0);
  float maxval = -INFINITY, sumval = 0.0f;
  for (int i = threadIdx.x; i < C; i += warpSize) {
    const float v = x[i];
    if (v > maxval) {
      sumval *= expf(maxval - v);
      maxval = v;
    }
    sumval += expf(v - maxval);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const float m = __shfl_xor_sync(0xFFFFFFFF, maxval, offset), s = __shfl_xor_sync(0xFFFFFFFF, sumval,
        offset);
    const float larger = fmaxf(m, maxval);
    sumval = larger == -INFINITY ? 0.f : sumval * expf(maxval - larger) + s * expf(m - larger);
    maxval = larger;
  }
  if (threadIdx.x == 0) loss[row] = logf(sumval) + maxval - x[target[row]];
}
"""
GELU_FOURS = """
template <typename T>
struct alignas(4 * sizeof(T)) Pack { T val[4]; };
struct Gelu {
  __device__ float operator()(float x) const { return 0.5f * x * (1.f + erff(x * 0.70710678f)); }
};
template <class Op, class T>
__device__ void elementwise(const T* in, T* out, int n, Op op) {
  const int step = blockDim.x * gridDim.x;
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = at; i < n / 4; i += step) {
    Pack<T> pack = reinterpret_cast<const Pack<T>*>(in)[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) pack.val[j] = op(pack.val[j]);
    reinterpret_cast<Pack<T>*>(out)[i] = pack;
  }
  for (int i = n / 4 * 4 + at; i < n; i += step) out[i] = op(in[i]);  // rest
}
__global__ void KERNEL(Contiguous<const float> x, Contiguous<float> y) { elementwise(x.data, y.data,
    x.numel(), Gelu{}); }
"""
DROPOUT = """
__device__ __forceinline__ uint32_t hashed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  x ^= x >> 16;
  return x;
}
__global__ void KERNEL(Contiguous<const float, 1> x, int64_t seed, Contiguous<float, 1> y) {
  int idx = threadIdx.x + blockIdx.x * blockDim.x;
  if (idx >= x.numel()) return;
  const bool keep = hashed(idx ^ uint32_t(seed)) & 1;
  y[idx] = keep ? 2.f * x[idx] : 0.f;
}
"""
QUANTIZED = """
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<int8_t, 2> q, Contiguous<float, 1> scale) {
  __shared__ float warp_max[4];
  const int n = x.size(1), row = blockIdx.x;
  float amax = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) amax = fmaxf(amax, fabsf(x(row, i)));
  for (int o = 16; o; o >>= 1) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, o));
  if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = amax;
  __syncthreads();  // maxima
  amax = fmaxf(fmaxf(warp_max[0], warp_max[1]), fmaxf(warp_max[2], warp_max[3]));
  const float s = amax / 127.f;
  if (threadIdx.x == 0) scale[row] = s;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const int v = __float2int_rn(x(row, i) / s);
    q(row, i) = (int8_t)max(-127, min(127, v));
  }
}
"""

# ---- Counting, compaction and locks.

HISTOGRAMS = """
#define NUM_BINS 16
__global__ void KERNEL(Contiguous<const int64_t, 1> data, Contiguous<int64_t, 1> bins) {
  __shared__ unsigned int s_bins[4][NUM_BINS];
  unsigned int* mine = s_bins[threadIdx.x / 32];
  for (int b = threadIdx.x; b < 4 * NUM_BINS; b += blockDim.x) (&s_bins[0][0])[b] = 0u;
  __syncthreads();  // zeroed
  for (int i = threadIdx.x; i < data.numel(); i += blockDim.x) {
    int bin = (int)(data[i] % NUM_BINS);
    atomicAdd(mine + bin, 1u);  // add
  }
  __syncthreads();  // counted
  for (int b = threadIdx.x; b < NUM_BINS; b += blockDim.x) {
    unsigned int sum = 0;
    for (int w = 0; w < 4; ++w) sum += s_bins[w][b];
    bins[b] = sum;
  }
}
"""
COMPACTED = """
__global__ void KERNEL(Contiguous<const float, 1> in, Contiguous<float, 1> out, Contiguous<int64_t,
    1> count) {
  __shared__ int warp_base[32];
  __shared__ int total;
  const int n = in.numel(), lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();  // zeroed
  for (int first = 0; first < n; first += blockDim.x) {
    const int i = first + threadIdx.x;
    const bool keep = i < n && in[i] > 0.f;
    const unsigned ballot = __ballot_sync(0xffffffffu, keep);
    const int rank = __popc(ballot & ((1u << lane) - 1));
    if (lane == 0) warp_base[warp] = __popc(ballot);
    __syncthreads();  // counts
    if (threadIdx.x == 0) {
      for (int w = 0; w < warps; ++w) {
        const int c = warp_base[w];
        warp_base[w] = total;
        total += c;
      }
    }
    __syncthreads();  // bases
    if (keep) out[warp_base[warp] + rank] = in[i];
    __syncthreads();  // next
  }
  for (int i = total + threadIdx.x; i < n; i += blockDim.x) out[i] = 0.f;  // rest
  if (threadIdx.x == 0) count[0] = total;
}
"""
AGGREGATED = """
__device__ int atomicAggInc(int* ctr) {
  const unsigned int mask = __activemask();
  const int leader = __ffs(mask) - 1;
  int res;
  const int lane = threadIdx.x % 32;
  if (lane == leader) res = atomicAdd(ctr, __popc(mask));
  res = __shfl_sync(mask, res, leader);
  return res + __popc(mask & ((1u << lane) - 1));
}
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<int64_t, 1> count) {
  __shared__ int counter;
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < x.numel(); i += blockDim.x)
    if (x[i] > 0) atomicAggInc(&counter);
  __syncthreads();
  if (threadIdx.x == 0) count[0] = counter;
}
"""
MATCHED = """
__global__ void KERNEL(Contiguous<const int64_t, 1> keys, Contiguous<const float, 1> values,
    Contiguous<float, 1> sums) {
  __shared__ float bins[8];
  const int lane = threadIdx.x & 31;
  if (threadIdx.x < 8) bins[threadIdx.x] = 0.f;
  __syncthreads();
  const int key = (int)keys[threadIdx.x];
  const unsigned peers = __match_any_sync(0xffffffffu, key);
  float sum = 0.f;
  for (unsigned rest = peers; rest; rest &= rest - 1) {
    const int from = __ffs(rest) - 1;
    sum += __shfl_sync(peers, values[threadIdx.x], from);
  }
  if (lane == __ffs(peers) - 1) atomicAdd(&bins[key], sum);
  __syncthreads();
  if (threadIdx.x < 8) sums[threadIdx.x] = bins[threadIdx.x];
}
"""
SPIN_LOCK = """
struct Lock {
  int mutex;
  __device__ void lock() {
    while (atomicCAS(&mutex, 0, 1) != 0);
    __threadfence();
  }
  __device__ void unlock() {
    __threadfence();
    atomicExch(&mutex, 0);
  }
};
__device__ Lock guard;
__device__ float grand_total;
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> seen) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = i < x.numel() ? x[i] : 0.f;
  for (int o = 16; o > 0; o >>= 1) sum += __shfl_down_sync(0xffffffff, sum, o);
  if (threadIdx.x == 0) {
    guard.lock();
    grand_total += sum;
    guard.unlock();
    seen[blockIdx.x] = sum;
  }
}
"""
FLOAT_MAX = """
__device__ float atomicMaxFloat(float* address, float val) {
  int* address_as_i = (int*)address;
  int old = *address_as_i, assumed;
  do {
    assumed = old;
    old = atomicCAS(address_as_i, assumed, __float_as_int(fmaxf(val, __int_as_float(assumed))));
  } while (assumed != old);
  return __int_as_float(old);
}
__global__ void KERNEL(Contiguous<const float, 2> x, Contiguous<float, 1> y) {
  __shared__ float best;
  if (threadIdx.x == 0) best = -INFINITY;
  __syncthreads();
  for (int j = threadIdx.x; j < x.size(1); j += blockDim.x) atomicMaxFloat(&best, x(blockIdx.x, j));
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = best;
}
"""
PRINTED = """
#include <stdio.h>
#include <assert.h>
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  const long long begin = clock64();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  assert(blockDim.x == 32);
  if (i == 0 && x[0] > 1e30f) printf("element %d is %f\\n", i, x[i]);
  if (i < x.numel()) y[i] = x[i] * 2.0f;
  if (clock64() < begin) y[0] = 0.f;
}
"""
PRODUCER = """
__global__ void KERNEL(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  __shared__ float buffer[2][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = x.numel();
  if (warp == 0) buffer[0][lane] = lane < n ? x[lane] : 0.f;
  __syncthreads();  // first
  int stage = 0;
  for (int first = 0; first < n; first += 32) {
    if (warp == 0) {
      const int i = first + 32 + lane;
      buffer[stage ^ 1][lane] = i < n ? x[i] : 0.f;
    } else {
      const int i = first + lane;
      if (i < n) y[i] = 2.f * buffer[stage][31 - lane];  // consume
    }
    __syncthreads();  // stage
    stage ^= 1;
  }
}
"""

# ---- Low precision by NVIDIA's headers.

HALF_AXPY = """
#include <cuda_fp16.h>
__global__ void KERNEL(double a, Contiguous<const Half, 1> x, Contiguous<const Half, 1> y,
    Contiguous<Half, 1> z) {
  const int n = x.numel(), stride = gridDim.x * blockDim.x;
  const half2* x2 = (const half2*)x.data;
  const half2* y2 = (const half2*)y.data;
  half2* z2 = (half2*)z.data;
  const half2 a2 = __float2half2_rn(float(a));
  for (int i = threadIdx.x + blockIdx.x * blockDim.x; i < n / 2; i += stride) z2[i] = __hfma2(a2, x2[i],
      y2[i]);
  const half* xs = (const half*)x.data;
  const half* ys = (const half*)y.data;
  half* zs = (half*)z.data;
  if (threadIdx.x == 0 && blockIdx.x == 0 && n % 2) zs[n - 1] = __hadd(__hmul(__float2half(float(a)),
      xs[n - 1]), ys[n - 1]);
}
"""
HALF_DOT = """
#include <cuda_fp16.h>
__global__ void KERNEL(Contiguous<const Half, 1> a, Contiguous<const Half, 1> b, Contiguous<float, 1> out) {
  __shared__ half2 shArray[64];
  const half2* a2 = reinterpret_cast<const half2*>(a.data);
  const half2* b2 = reinterpret_cast<const half2*>(b.data);
  shArray[threadIdx.x] = __float2half2_rn(0.f);
  half2 value = __float2half2_rn(0.f);
  for (int i = threadIdx.x; i < a.numel() / 2; i += blockDim.x) value = __hfma2(a2[i], b2[i], value);
  shArray[threadIdx.x] = value;
  __syncthreads();  // all
  for (int s = 32; s > 0; s >>= 1) {
    if (threadIdx.x < s) shArray[threadIdx.x] = __hadd2(shArray[threadIdx.x], shArray[threadIdx.x + s]);
    __syncthreads();
  }
  if (threadIdx.x == 0) out[0] = __low2float(shArray[0]) + __high2float(shArray[0]);
}
"""
HALF_SOFTMAX = """
#include <cuda_fp16.h>
__device__ __half warp_max(__half v) {
  for (int o = 16; o > 0; o >>= 1) v = __hmax(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}
__device__ __half warp_sum(__half v) {
  for (int o = 16; o > 0; o >>= 1) v = __hadd(v, __shfl_down_sync(0xffffffffu, v, o));
  return __shfl_sync(0xffffffffu, v, 0);
}
__global__ void KERNEL(Contiguous<const Half, 2> x, Contiguous<Half, 2> y) {
  const __half* in = reinterpret_cast<const __half*>(x.data) + blockIdx.x * x.size(1);
  __half* out = reinterpret_cast<__half*>(y.data) + blockIdx.x * x.size(1);
  __half high = __float2half(-65504.f), sum = __float2half(0.f);
  for (int j = threadIdx.x; j < x.size(1); j += 32) high = __hmax(high, in[j]);
  high = warp_max(high);
  for (int j = threadIdx.x; j < x.size(1); j += 32) sum += hexp(in[j] - high);
  sum = warp_sum(sum);
  for (int j = threadIdx.x; j < x.size(1); j += 32) out[j] = __hdiv(hexp(__hsub(in[j], high)), sum);
}
"""
HALF_ATOMIC = """
#include <cuda_fp16.h>
__global__ void KERNEL(Contiguous<const Half, 1> x, Contiguous<Half, 1> y) {
  __shared__ __half2 pair;
  __shared__ __half one;
  if (threadIdx.x == 0) pair = __halves2half2(__ushort_as_half(0), __ushort_as_half(0)), one = __half(0.f);
  __syncthreads();
  const __half2 mine = reinterpret_cast<const __half2*>(x.data)[threadIdx.x];
  atomicAdd(&pair, mine);
  atomicAdd(&one, __hadd(mine.x, __high2half(mine)));
  __syncthreads();
  if (threadIdx.x == 0) {
    y[0] = Half(__half2float(__low2half(pair)));
    y[1] = Half(__half2float(pair.y));
    y[2] = Half(__half2float(one));
  }
}
"""
BF16_PAIRS = """
#include <cuda_bf16.h>
__global__ void KERNEL(Contiguous<const BFloat16, 1> x, Contiguous<BFloat16, 1> y) {
  const __nv_bfloat162* in = reinterpret_cast<const __nv_bfloat162*>(x.data);
  __nv_bfloat162* out = reinterpret_cast<__nv_bfloat162*>(y.data);
  const __nv_bfloat162 two = __float2bfloat162_rn(2.f);
  for (int i = threadIdx.x; i < x.numel() / 2; i += blockDim.x) {
    float2 f = __bfloat1622float2(__hmul2(in[i], two));
    f.x += __bfloat162float(__float2bfloat16(0.f));
    out[i] = __floats2bfloat162_rn(f.x, f.y);
  }
}
"""


def softmax(x: Tensor) -> Tensor:
    return x.softmax(1)


def layernorm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, (x.shape[1],), gamma, beta, eps)


def rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(1, keepdim=True) + eps) * w


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.t() / math.sqrt(q.shape[1])).softmax(1) @ v


def embedded(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids]


def wrapped(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids % len(table)]


def embedding_grad(ids: Tensor, outer: Tensor, rows: int) -> Tensor:
    return outer.new_zeros(rows, outer.shape[1]).index_add(0, ids, outer)


def rotated(x: Tensor) -> Tensor:
    half = x.shape[2] // 2
    powers = 10000.0 ** (-2.0 * torch.arange(half, device=x.device) / x.shape[2])
    angle = (torch.arange(x.shape[0], device=x.device)[:, None] * powers)[:, None].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 2)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits, target, reduction="none")


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x)


def dropped(x: Tensor, seed: int) -> Tensor:
    h = torch.arange(x.numel(), device=x.device) ^ (seed & 0xFFFFFFFF)
    for by, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = ((h ^ (h >> by)) * factor) & 0xFFFFFFFF
    return torch.where((h ^ (h >> 16)) & 1 == 1, 2 * x, torch.zeros_like(x))


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1) / 127
    return (x / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def counts(x: Tensor) -> Tensor:
    return x.new_zeros(16).index_add(0, x % 16, torch.ones_like(x))


def compacted(x: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort((x <= 0).int(), stable=True)
    return torch.where(x[order] > 0, x[order], torch.zeros_like(x)), (x > 0).sum(0, keepdim=True)


def positive(x: Tensor) -> Tensor:
    return (x > 0).sum(0, keepdim=True)


def binned(keys: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(8).index_add(0, keys, values)


def sums_of_32(x: Tensor) -> Tensor:
    return functional.pad(x, (0, -x.numel() % 32)).view(-1, 32).sum(1)


def largest(x: Tensor) -> Tensor:
    return x.amax(1)


def double(x: Tensor) -> Tensor:
    return x * 2


def turned(x: Tensor) -> Tensor:
    return 2 * x.view(-1, 32).flip(1).flatten()


def axpy(a: float, x: Tensor, y: Tensor) -> Tensor:
    return a * x + y


def half_dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() * b.float()).sum(0, keepdim=True)


def sums_of_pairs(x: Tensor) -> Tensor:
    first, second = x[::2].sum(), x[1::2].sum()
    return torch.stack([first, second, first + second])


ROW = {"grid": "x.shape[0]", "block": 64}
ONE = {"grid": 1, "block": 64}
ATTENDED = {
    "grid": "ceil(q.shape[0] / 16)",
    "block": 16,
    "shared": "(2 * 16 * 8 + 16 * 16) * 4",
    "constants": {"D": "8", "BR": "16"},
}
IDS = torch.tensor([3, 0, 9, 3, 7])
KEYS = torch.arange(64) * 3 % 8
HALVES = numbers(64, dtype=torch.float16) / 4

RIGHT = [
    KernelCase(
        "online_softmax",
        ONLINE_SOFTMAX.replace("FLT_MAX", "3.402823466e+38f"),
        softmax,
        (numbers(3, 100),),
        {**ROW, "constants": {"THREADBLOCK_SIZE": "64"}},
    ),
    KernelCase("layernorm", LAYERNORM, layernorm, (numbers(3, 100), numbers(100), numbers(100), 1e-5), ROW),
    KernelCase("rmsnorm_fours", RMSNORM_FOURS, rmsnorm, (numbers(3, 68), numbers(68), 1e-6), ROW),
    KernelCase(
        "attention",
        ATTENTION,
        attention,
        (numbers(40, 8), numbers(40, 8).flip(0), numbers(40, 8) + 1),
        ATTENDED,
    ),
    KernelCase("embedding", EMBEDDING, embedded, (IDS, numbers(10, 40)), {"grid": "ids.numel", "block": 32}),
    KernelCase(
        "embedding_grad",
        EMBEDDING_GRAD,
        embedding_grad,
        (IDS, numbers(5, 40), 10),
        {"grid": "rows", "block": 32},
    ),
    KernelCase(
        "rope", ROPE, rotated, (numbers(5, 2, 12),), {"grid": ("x.shape[0]", "x.shape[1]"), "block": 32}
    ),
    KernelCase(
        "cross_entropy",
        CROSS_ENTROPY,
        cross_entropy,
        (numbers(5, 40), torch.tensor([1, 0, 39, 4, 9])),
        {"grid": 3, "block": (32, 2)},
    ),
    KernelCase("gelu_fours", GELU_FOURS, gelu, (numbers(3, 35),), {"grid": 1, "block": 16}),
    KernelCase("dropout", DROPOUT, dropped, (numbers(70), 12345), {"grid": 3, "block": 32}),
    KernelCase("quantized", QUANTIZED, quantized, (numbers(3, 200),), {"grid": "x.shape[0]", "block": 128}),
    KernelCase("histograms", HISTOGRAMS, counts, (torch.arange(500) * 13 % 97,), {"grid": 1, "block": 128}),
    KernelCase("compacted", COMPACTED, compacted, (numbers(150),), ONE),
    KernelCase("aggregated", AGGREGATED, positive, (numbers(150),), ONE),
    KernelCase("matched", MATCHED, binned, (KEYS, numbers(64)), ONE),
    KernelCase(
        "spin_lock", SPIN_LOCK, sums_of_32, (numbers(100),), {"grid": "ceil(x.numel / 32)", "block": 32}
    ),
    KernelCase("float_max", FLOAT_MAX, largest, (numbers(2, 90),), ROW),
    KernelCase("printed", PRINTED, double, (numbers(70),), {"grid": 3, "block": 32}),
    KernelCase("producer", PRODUCER, turned, (numbers(96),), ONE),
]
WITH_NVIDIA = [
    KernelCase(
        "half_axpy",
        HALF_AXPY,
        axpy,
        (0.5, numbers(33, dtype=torch.float16), numbers(33, dtype=torch.float16)),
        ONE,
    ),
    KernelCase("half_dot", HALF_DOT, half_dot, (HALVES, HALVES.flip(0)), ONE),
    KernelCase("half_exponents", HALF_SOFTMAX, softmax, (HALVES.view(2, 32),), {"grid": 2, "block": 32}),
    KernelCase("half_atomic", HALF_ATOMIC, sums_of_pairs, (HALVES,), {"grid": 1, "block": 32}),
    KernelCase("bfloat16_pairs", BF16_PAIRS, double, (numbers(64, dtype=torch.bfloat16),), ONE),
]
_CASES = {each.name: each for each in (*RIGHT, *WITH_NVIDIA)}


def wrong(right: str, name: str, cause: str, before: str, after: str, **launch: object) -> KernelCase:
    return with_fault(_CASES[right], name, cause, before, after, launch)


WRONG = [
    wrong("online_softmax", "fold_without_barrier", "race", "__syncthreads();  // fold", ""),
    wrong(
        "online_softmax",
        "maximum_not_taken_off",
        "wrong values",
        "__expf(in[elem_id] - md_total.m)",
        "__expf(in[elem_id])",
    ),
    wrong(
        "online_softmax",
        "half_a_row",
        "uninitialized",
        "elem_id += THREADBLOCK_SIZE)\n    out",
        "elem_id += 2 * THREADBLOCK_SIZE)\n    out",
    ),
    wrong("layernorm", "mean_not_yet_known", "race", "__syncthreads();  // known", ""),
    wrong("layernorm", "every_warp_at_first", "race", "s_parts[warp] = acc;", "s_parts[0] = acc;"),
    wrong(
        "layernorm",
        "parts_of_a_warp_too_many",
        "uninitialized",
        "w < blockDim.x / 32;",
        "w <= blockDim.x / 32;",
    ),
    wrong(
        "layernorm",
        "gamma_of_the_row",
        "out-of-bounds",
        "float(gamma[i])",
        "float(gamma[blockIdx.x * n + i])",
    ),
    wrong("rmsnorm_fours", "sum_by_hand", "race", "atomicAdd(&total, part);  // add", "total += part;"),
    wrong("rmsnorm_fours", "zero_not_seen", "race", "__syncthreads();  // zeroed", ""),
    wrong("rmsnorm_fours", "read_before_added", "race", "__syncthreads();  // added", ""),
    KernelCase("rows_of_67", RMSNORM_FOURS, rmsnorm, (numbers(3, 67), numbers(67), 1e-6), ROW, "misaligned"),
    wrong("attention", "keys_replaced_early", "race", "__syncthreads();  // used", ""),
    wrong(
        "attention",
        "rest_of_the_keys",
        "out-of-bounds",
        "const int rows = min(BR, N - j);",
        "const int rows = BR;",
    ),
    wrong("attention", "shared_without_scores", "out-of-bounds", "// used", "", shared="2 * 16 * 8 * 4"),
    wrong("attention", "not_rescaled", "wrong values", "for (int k = 0; k < D; k++) acc[k] *= alpha;", ""),
    wrong("attention", "queries_not_tested", "out-of-bounds", "if (q < N)\n    for", "for"),
    wrong(
        "attention",
        "barrier_of_real_queries",
        "divergent-barrier",
        "      m = row_m;\n    }",
        "      m = row_m;\n      __syncthreads();\n    }",
    ),
    KernelCase(
        "id_of_no_row",
        EMBEDDING.replace("(id >= 0 && id < table.size(0)) ?", "true ?"),
        wrapped,
        (IDS * 2, numbers(10, 40)),
        {"grid": "ids.numel", "block": 32},
        "out-of-bounds",
    ),
    wrong("embedding", "first_elements_only", "uninitialized", "d < dim;", "d < blockDim.x;"),
    wrong(
        "embedding_grad",
        "scattered_by_all",
        "race",
        "if (ids[t] == row) sum += outer(t, d);",
        "if (ids[t] == row) sum += outer(t, d);\n    out(0, d) = sum;",
    ),
    wrong("rope", "half_not_tested", "out-of-bounds", "if (i >= half) return;", ""),
    wrong("cross_entropy", "target_of_another_row", "out-of-bounds", "x[target[row]]", "x[target[row + 1]]"),
    wrong("cross_entropy", "rows_not_tested_here", "out-of-bounds", "if (row >= logits.size(0)) return;", ""),
    wrong("gelu_fours", "rest_left_out", "uninitialized", "out[i] = op(in[i]);  // rest", ";"),
    wrong("gelu_fours", "rounded_up", "out-of-bounds", "i < n / 4; i += step", "i < (n + 3) / 4; i += step"),
    KernelCase(
        "fours_of_a_slice", GELU_FOURS, gelu, (numbers(71)[3:],), {"grid": 1, "block": 16}, "misaligned"
    ),
    wrong(
        "dropout",
        "threads_behind_the_end",
        "out-of-bounds",
        "if (idx >= x.numel()) return;",
        "if (idx > x.numel()) return;",
    ),
    wrong("quantized", "two_warps_of_four", "uninitialized", "// maxima", "", block=64),
    wrong(
        "quantized",
        "scale_of_each_thread",
        "race",
        "if (threadIdx.x == 0) scale[row] = s;",
        "scale[row] = s + threadIdx.x;",
    ),
    wrong("histograms", "not_zeroed_for_all", "uninitialized", "b < 4 * NUM_BINS;", "b < NUM_BINS;"),
    wrong("histograms", "bins_of_a_warp", "race", "atomicAdd(mine + bin, 1u);", "mine[bin]++;"),
    wrong("histograms", "remainder_forgotten", "out-of-bounds", "(int)(data[i] % NUM_BINS)", "(int)data[i]"),
    wrong("compacted", "base_before_it_is_there", "race", "__syncthreads();  // bases", ""),
    wrong("compacted", "count_of_the_next_round", "race", "__syncthreads();  // next", ""),
    wrong(
        "compacted",
        "ballot_of_those_in_range",
        "divergent-barrier",
        "const bool keep = i < n && in[i] > 0.f;",
        "if (i >= n) break;\n    const bool keep = in[i] > 0.f;",
    ),
    wrong("compacted", "rest_not_written", "uninitialized", "out[i] = 0.f;  // rest", ";"),
    wrong("compacted", "own_lane_counted", "uninitialized", "((1u << lane) - 1)", "((2u << lane) - 1)"),
    wrong(
        "aggregated",
        "leader_of_no_mask",
        "divergent-barrier",
        "const unsigned int mask = __activemask();",
        "const unsigned int mask = 0xffffffffu;",
    ),
    wrong("matched", "bins_of_seven", "out-of-bounds", "float bins[8];", "float bins[7];"),
    wrong("spin_lock", "unlocked_plainly", "race", "atomicExch(&mutex, 0);", "mutex = 0;"),
    wrong("spin_lock", "no_lock", "race", "while (atomicCAS(&mutex, 0, 1) != 0);", ""),
    wrong(
        "float_max",
        "read_then_written",
        "race",
        "atomicMaxFloat(&best, x(blockIdx.x, j))",
        "best = fmaxf(best, x(blockIdx.x, j))",
    ),
    wrong(
        "printed",
        "assertion_about_the_block",
        "raises",
        "assert(blockDim.x == 32);",
        "assert(blockDim.x == 64);",
    ),
    wrong("producer", "one_stage", "race", "buffer[stage ^ 1][lane] =", "buffer[stage][lane] ="),
    wrong(
        "producer",
        "barrier_of_the_consumer",
        "divergent-barrier",
        "// consume\n    }\n    __syncthreads();  // stage",
        "__syncthreads();\n    }",
    ),
]
