"""CUDA kernels on matrices and grids, as tutorials write them, and what is commonly wrong with them."""

from __future__ import annotations

import torch
from emulated_kernels import KernelCase, numbers, with_fault
from torch import Tensor
from torch.nn import functional

TRANSPOSE_ROWS = """
#define TILE_DIM 32
#define BLOCK_ROWS 8
__global__ void KERNEL(Contiguous<const float, 2> idata, Contiguous<float, 2> odata) {
  __shared__ float tile[TILE_DIM][TILE_DIM + 1];
  const int height = idata.size(0), width = idata.size(1);
  int x = blockIdx.x * TILE_DIM + threadIdx.x;
  int y = blockIdx.y * TILE_DIM + threadIdx.y;
  for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS)
    if (x < width && y + j < height) tile[threadIdx.y + j][threadIdx.x] = idata[(y + j) * width + x];  // in
  __syncthreads();
  x = blockIdx.y * TILE_DIM + threadIdx.x;
  y = blockIdx.x * TILE_DIM + threadIdx.y;
  for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS)
    if (x < height && y + j < width) odata[(y + j) * height + x] = tile[threadIdx.x][threadIdx.y + j];  // out
}
"""
TRANSPOSE_FOURS = """
__global__ void KERNEL(Contiguous<const float, 2> in, Contiguous<float, 2> out) {
  __shared__ float tile[32][33];
  const int n = in.size(0), m = in.size(1);
  const int row = blockIdx.y * 32 + threadIdx.y, col = blockIdx.x * 32 + threadIdx.x * 4;
  const float4 v = reinterpret_cast<const float4*>(in.data)[(row * m + col) / 4];  // vector
  tile[threadIdx.y][threadIdx.x * 4 + 0] = v.x;
  tile[threadIdx.y][threadIdx.x * 4 + 1] = v.y;
  tile[threadIdx.y][threadIdx.x * 4 + 2] = v.z;
  tile[threadIdx.y][threadIdx.x * 4 + 3] = v.w;
  __syncthreads();
  const int r = blockIdx.x * 32 + threadIdx.y, c = blockIdx.y * 32 + threadIdx.x * 4;
  float4 w;
  w.x = tile[threadIdx.x * 4 + 0][threadIdx.y];
  w.y = tile[threadIdx.x * 4 + 1][threadIdx.y];
  w.z = tile[threadIdx.x * 4 + 2][threadIdx.y];
  w.w = tile[threadIdx.x * 4 + 3][threadIdx.y];
  *reinterpret_cast<float4*>(&out(r, c)) = w;
}
"""
SGEMM = """
template <const int BM, const int BN, const int BK, const int TM>
__global__ void __launch_bounds__((BM * BN) / TM) KERNEL(Contiguous<const float, 2> A,
    Contiguous<const float, 2> B, Contiguous<float, 2> C) {
  const int M = A.size(0), K = A.size(1), N = B.size(1);
  const uint cRow = blockIdx.y, cCol = blockIdx.x;
  const int threadCol = threadIdx.x % BN, threadRow = threadIdx.x / BN;
  __shared__ float As[BM * BK];
  __shared__ float Bs[BK * BN];
  const float* a = A.data + cRow * BM * K;
  const float* b = B.data + cCol * BN;
  float* c = C.data + cRow * BM * N + cCol * BN;
  const uint innerColA = threadIdx.x % BK, innerRowA = threadIdx.x / BK;
  const uint innerColB = threadIdx.x % BN, innerRowB = threadIdx.x / BN;
  float threadResults[TM] = {0.0};
  for (uint bkIdx = 0; bkIdx < K; bkIdx += BK) {
    As[innerRowA * BK + innerColA] = a[innerRowA * K + innerColA];
    Bs[innerRowB * BN + innerColB] = b[innerRowB * N + innerColB];
    __syncthreads();  // loaded
    a += BK;
    b += BK * N;
    for (uint dotIdx = 0; dotIdx < BK; ++dotIdx) {
      float tmpB = Bs[dotIdx * BN + threadCol];
      for (uint resIdx = 0; resIdx < TM; ++resIdx) {
        threadResults[resIdx] += As[(threadRow * TM + resIdx) * BK + dotIdx] * tmpB;
      }
    }
    __syncthreads();  // used
  }
  for (uint resIdx = 0; resIdx < TM; ++resIdx) {
    c[(threadRow * TM + resIdx) * N + threadCol] = threadResults[resIdx];
  }
}
"""
DOUBLE_BUFFERED = """
#define TS 8
__global__ void KERNEL(Contiguous<const float, 2> A, Contiguous<const float, 2> B, Contiguous<float, 2> C) {
  __shared__ float As[2][TS][TS];
  __shared__ float Bs[2][TS][TS];
  const int M = A.size(0), K = A.size(1), N = B.size(1);
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int row = blockIdx.y * TS + ty, col = blockIdx.x * TS + tx;
  const int tiles = (K + TS - 1) / TS;
  int buf = 0;
  As[0][ty][tx] = (row < M && tx < K) ? A(row, tx) : 0.f;
  Bs[0][ty][tx] = (ty < K && col < N) ? B(ty, col) : 0.f;
  __syncthreads();  // first
  float acc = 0.f;
  for (int t = 0; t < tiles; ++t) {
    if (t + 1 < tiles) {
      const int ka = (t + 1) * TS + tx, kb = (t + 1) * TS + ty;
      As[buf ^ 1][ty][tx] = (row < M && ka < K) ? A(row, ka) : 0.f;
      Bs[buf ^ 1][ty][tx] = (kb < K && col < N) ? B(kb, col) : 0.f;
    }
#pragma unroll
    for (int k = 0; k < TS; ++k) acc = fmaf(As[buf][ty][k], Bs[buf][k][tx], acc);
    __syncthreads();  // swap
    buf ^= 1;
  }
  if (row < M && col < N) C(row, col) = acc;
}
"""
MATVEC = """
__global__ void KERNEL(Contiguous<const float, 2> A, Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  const int warp_id = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (warp_id >= A.size(0)) return;
  const float* __restrict__ row = A.data + (size_t)warp_id * A.size(1);
  float acc = 0.0f;
  for (int j = lane; j < A.size(1); j += 32) acc += __ldg(row + j) * __ldg(x.data + j);
  acc += __shfl_xor_sync(0xffffffff, acc, 16);
  acc += __shfl_xor_sync(0xffffffff, acc, 8);
  acc += __shfl_xor_sync(0xffffffff, acc, 4);
  acc += __shfl_xor_sync(0xffffffff, acc, 2);
  acc += __shfl_xor_sync(0xffffffff, acc, 1);
  if (lane == 0) y[warp_id] = acc;
}
"""
SPMV = """
__global__ void KERNEL(Contiguous<const int64_t, 1> row_ptr, Contiguous<const int64_t, 1> col,
    Contiguous<const float, 1> val,
                       Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 4;
  const int lane = threadIdx.x % 4;
  const int n = row_ptr.numel() - 1;
  float sum = 0;
  if (row < n) {
    for (int64_t j = row_ptr[row] + lane; j < row_ptr[row + 1]; j += 4) sum += val[j] * x[col[j]];
  }
  sum += __shfl_down_sync(0xffffffff, sum, 2, 4);
  sum += __shfl_down_sync(0xffffffff, sum, 1, 4);
  if (lane == 0 && row < n) y[row] = sum;
}
"""

# ---- Grids.

STENCIL_1D = """
#define RADIUS 3
#define BLOCK_SIZE 32
__global__ void KERNEL(Contiguous<const float, 1> in, Contiguous<float, 1> out) {
  __shared__ float temp[BLOCK_SIZE + 2 * RADIUS];
  const int n = out.numel();
  int gindex = threadIdx.x + blockIdx.x * blockDim.x + RADIUS;
  int lindex = threadIdx.x + RADIUS;
  temp[lindex] = gindex < n + 2 * RADIUS ? in[gindex] : 0.f;
  if (threadIdx.x < RADIUS) {
    temp[lindex - RADIUS] = in[gindex - RADIUS];
    temp[lindex + BLOCK_SIZE] = gindex + BLOCK_SIZE < n + 2 * RADIUS ? in[gindex + BLOCK_SIZE] : 0.f;
  }
  __syncthreads();
  float result = 0;
  for (int offset = -RADIUS; offset <= RADIUS; offset++) result += temp[lindex + offset];
  if (gindex - RADIUS < n) out[gindex - RADIUS] = result;
}
"""
HEAT = """
#define IDX(i, j) ((i) * w + (j))
__global__ void KERNEL(Contiguous<const float, 2> u, double alpha, Contiguous<float, 2> next) {
  __shared__ float s[10][10];
  const int h = u.size(0), w = u.size(1);
  const int tx = threadIdx.x + 1, ty = threadIdx.y + 1;
  const int j = blockIdx.x * 8 + threadIdx.x, i = blockIdx.y * 8 + threadIdx.y;
  const bool inside = i < h && j < w;
  s[ty][tx] = inside ? u[IDX(i, j)] : 0.f;
  if (threadIdx.y == 0) {
    s[0][tx] = i > 0 && j < w ? u[IDX(i - 1, j)] : 0.f;
    s[9][tx] = i + 8 < h && j < w ? u[IDX(i + 8, j)] : 0.f;  // below
  }
  if (threadIdx.x == 0) {
    s[ty][0] = j > 0 && i < h ? u[IDX(i, j - 1)] : 0.f;
    s[ty][9] = j + 8 < w && i < h ? u[IDX(i, j + 8)] : 0.f;  // right
  }
  __syncthreads();
  if (inside) {
    const float middle = s[ty][tx];
    const float around = s[ty - 1][tx] + s[ty + 1][tx] + s[ty][tx - 1] + s[ty][tx + 1];
    next[IDX(i, j)] = middle + float(alpha) * (around - 4 * middle);
  }
}
"""
STENCIL_3D = """
__global__ void KERNEL(Contiguous<const float, 3> in, Contiguous<float, 3> out) {
  const int nx = in.size(2), ny = in.size(1), nz = in.size(0);
  const int x = blockIdx.x * blockDim.x + threadIdx.x;
  const int y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= nx || y >= ny) return;
  const int plane = nx * ny;
  int at = y * nx + x;
  float behind = 0, current = in[at], front;
  for (int z = 0; z < nz; z++) {
    front = z + 1 < nz ? in[at + plane] : 0.f;  // front
    float sum = behind + front - 6 * current;
    sum += x > 0 ? in[at - 1] : 0.f;
    sum += x < nx - 1 ? in[at + 1] : 0.f;
    sum += y > 0 ? in[at - nx] : 0.f;
    sum += y < ny - 1 ? in[at + nx] : 0.f;
    out[at] = sum;
    behind = current;
    current = front;
    at += plane;
  }
}
"""
CONVOLUTION = """
#define MASK_WIDTH 5
#define TILE 12
__constant__ float gauss[MASK_WIDTH] = {0.0625f, 0.25f, 0.375f, 0.25f, 0.0625f};
__global__ void KERNEL(Contiguous<const float, 2> N, Contiguous<float, 2> P) {
  __shared__ float N_ds[TILE + MASK_WIDTH - 1][TILE + MASK_WIDTH - 1];
  const int height = N.size(0), width = N.size(1);
  int ty = threadIdx.y, tx = threadIdx.x;
  int row_o = blockIdx.y * TILE + ty, col_o = blockIdx.x * TILE + tx;
  int row_i = row_o - MASK_WIDTH / 2, col_i = col_o - MASK_WIDTH / 2;
  if ((row_i >= 0) && (row_i < height) && (col_i >= 0) && (col_i < width)) {
    N_ds[ty][tx] = N[row_i * width + col_i];
  } else {
    N_ds[ty][tx] = 0.0f;  // ghost
  }
  __syncthreads();
  float output = 0.0f;
  if (ty < TILE && tx < TILE) {
    for (int i = 0; i < MASK_WIDTH; i++)
      for (int j = 0; j < MASK_WIDTH; j++) output += gauss[i] * gauss[j] * N_ds[i + ty][j + tx];
    if (row_o < height && col_o < width) P[row_o * width + col_o] = output;
  }
}
"""
SEPARABLE = """
struct Tap { int offset; float weight; };
__constant__ Tap taps[] = {{-1, 0.25f}, {0, 0.5f}, {1, 0.25f}};
template <class F>
__device__ __forceinline__ float folded(F at) {
  float sum = 0.f;
#pragma unroll
  for (const Tap& tap : taps) sum += tap.weight * at(tap.offset);
  return sum;
}
__global__ void KERNEL(Contiguous<const float, 3> x, Contiguous<float, 3> y) {
  extern __shared__ __align__(sizeof(float)) unsigned char smem[];
  float* rows = reinterpret_cast<float*>(smem);
  const int H = x.size(1), W = x.size(2), c = blockIdx.x;
  const float* image = x.data + (int64_t)c * H * W;
  for (int p = threadIdx.x; p < H * W; p += blockDim.x) {
    const int i = p / W, j = p % W;
    rows[p] = folded([&](int by) { const int k = j + by; return k >= 0 && k < W ? image[i * W + k] : 0.f; });
  }
  __syncthreads();  // rows
  for (int p = threadIdx.x; p < H * W; p += blockDim.x) {
    const int i = p / W, j = p % W;
    y(c, i, j) = folded([&](int by) {
      const int k = i + by;
      return k >= 0 && k < H ? rows[k * W + j] : 0.f;
    });
  }
}
"""
IM2COL = """
#define CUDA_KERNEL_LOOP(i, n) for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); \\
  i += blockDim.x * gridDim.x)
template <typename T, int K>
__global__ void KERNEL(Contiguous<const T, 3> im, Contiguous<T, 2> col) {
  const int C = im.size(0), H = im.size(1), W = im.size(2);
  CUDA_KERNEL_LOOP(index, C * H * W) {
    const int w = index % W;
    const int h = (index / W) % H;
    const int c = index / W / H;
    T* out = col.data + (c * K * K) * (H * W) + h * W + w;
    for (int i = 0; i < K; ++i) {
      for (int j = 0; j < K; ++j) {
        const int y = h + i - K / 2, x = w + j - K / 2;
        *out = (y >= 0 && x >= 0 && y < H && x < W) ? im[(c * H + y) * W + x] : T(0);
        out += H * W;
      }
    }
  }
}
"""
POOL = """
template <class T>
__global__ void KERNEL(View<const T, 4> x, View<T, 4> y, View<int64_t, 4> which) {
  const int ow = blockIdx.x * blockDim.x + threadIdx.x;
  const int oh = blockIdx.y * blockDim.y + threadIdx.y;
  const int n = blockIdx.z / x.size(1), c = blockIdx.z % x.size(1);
  if (ow < y.size(3) && oh < y.size(2)) {
    T best = -INFINITY;
    int64_t at = 0;
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++) {
        const int h = oh * 2 + i, w = ow * 2 + j;
        if (h < x.size(2) && w < x.size(3) && x(n, c, h, w) > best)
          best = x(n, c, h, w), at = h * x.size(3) + w;
      }
    y(n, c, oh, ow) = best;
    which(n, c, oh, ow) = at;
  }
}
"""
NBODY = """
#define BLOCK 32
__device__ float3 bodyBodyInteraction(float4 bi, float4 bj, float3 ai) {
  float3 r;
  r.x = bj.x - bi.x;
  r.y = bj.y - bi.y;
  r.z = bj.z - bi.z;
  float distSqr = r.x * r.x + r.y * r.y + r.z * r.z + 1e-2f;
  float distSixth = distSqr * distSqr * distSqr;
  float invDistCube = 1.0f / sqrtf(distSixth);
  float s = bj.w * invDistCube;
  ai.x += r.x * s;
  ai.y += r.y * s;
  ai.z += r.z * s;
  return ai;
}
__global__ void KERNEL(Contiguous<const float, 2> bodies, Contiguous<float, 2> force) {
  __shared__ float4 shPosition[BLOCK];
  const float4* positions = (const float4*)bodies.data;
  const int N = bodies.size(0);
  float3 acc = {0.0f, 0.0f, 0.0f};
  const int gtid = blockIdx.x * blockDim.x + threadIdx.x;
  const float4 mine = gtid < N ? positions[gtid] : make_float4(0, 0, 0, 0);
  for (int tile = 0; tile < N; tile += BLOCK) {
    const int other = tile + threadIdx.x;
    shPosition[threadIdx.x] = other < N ? positions[other] : make_float4(0.f, 0.f, 0.f, 0.f);
    __syncthreads();  // tile
    for (int i = 0; i < BLOCK; i++) acc = bodyBodyInteraction(mine, shPosition[i], acc);
    __syncthreads();  // next
  }
  if (gtid < N) force(gtid, 0) = acc.x, force(gtid, 1) = acc.y, force(gtid, 2) = acc.z;
}
"""


def transposed(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def by_vector(a: Tensor, x: Tensor) -> Tensor:
    return a @ x


def sparse_product(rows: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    counts = rows[1:] - rows[:-1]
    at = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts, output_size=len(columns))
    return x.new_zeros(len(rows) - 1).index_add(0, at, values * x[columns])


def of_seven(x: Tensor) -> Tensor:
    return x.unfold(0, 7, 1).sum(1)


def heated(x: Tensor, alpha: float) -> Tensor:
    p = functional.pad(x, (1, 1, 1, 1))
    return x + alpha * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * x)


def laplacian(x: Tensor) -> Tensor:
    p = functional.pad(x, (1, 1, 1, 1, 1, 1))
    near = p[:-2, 1:-1, 1:-1] + p[2:, 1:-1, 1:-1] + p[1:-1, :-2, 1:-1] + p[1:-1, 2:, 1:-1]
    return near + p[1:-1, 1:-1, :-2] + p[1:-1, 1:-1, 2:] - 6 * x


def _folded(x: Tensor, weights: list[float]) -> Tensor:
    taps = x.new_tensor(weights)
    k = len(weights) // 2
    return functional.conv2d(x[:, None], torch.outer(taps, taps)[None, None], padding=k)[:, 0]


def blurred(x: Tensor) -> Tensor:
    return _folded(x[None], [0.0625, 0.25, 0.375, 0.25, 0.0625])[0]


def smoothed(x: Tensor) -> Tensor:
    return _folded(x, [0.25, 0.5, 0.25])


def columns(x: Tensor) -> Tensor:
    return functional.unfold(x[None], 3, padding=1)[0]


def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    return functional.max_pool2d(x, 2, ceil_mode=True, return_indices=True)


def forces(bodies: Tensor) -> Tensor:
    apart = bodies[None, :, :3] - bodies[:, None, :3]
    return (apart * (bodies[:, 3] * (apart.square().sum(2) + 1e-2) ** -1.5)[:, :, None]).sum(1)


ROWS_OF_32 = {"grid": ("ceil(x.shape[1] / 32)", "ceil(x.shape[0] / 32)"), "block": (32, 8)}
SIZES = {"BM": "16", "BN": "16", "BK": "4", "TM": "4"}
GEMM = {"grid": ("b.shape[1] // 16", "a.shape[0] // 16"), "block": 64, "constants": SIZES}
TILED = {"grid": ("ceil(b.shape[1] / 8)", "ceil(a.shape[0] / 8)"), "block": (8, 8)}
OF_EIGHT = {"grid": ("ceil(x.shape[1] / 8)", "ceil(x.shape[0] / 8)"), "block": (8, 8)}
OF_TWELVE = {"grid": ("ceil(x.shape[1] / 12)", "ceil(x.shape[0] / 12)"), "block": (16, 16)}
PLANES = {"grid": ("ceil(x.shape[2] / 8)", "ceil(x.shape[1] / 4)"), "block": (8, 4)}
IMAGES = {"grid": "x.shape[0]", "block": 64, "shared": "x.shape[1] * x.shape[2] * 4"}
POOLS = {"grid": (1, 1, "x.shape[0] * x.shape[1]"), "block": (4, 4)}
SPARSE = (torch.tensor([0, 2, 2, 9, 12]), torch.arange(12) * 5 % 7, numbers(12), numbers(7))

RIGHT = [
    KernelCase("transpose_rows", TRANSPOSE_ROWS, transposed, (numbers(40, 50),), ROWS_OF_32),
    KernelCase(
        "transpose_fours", TRANSPOSE_FOURS, transposed, (numbers(32, 64),), {"grid": (2, 1), "block": (8, 32)}
    ),
    KernelCase("sgemm", SGEMM, product, (numbers(32, 12), numbers(12, 16)), GEMM),
    KernelCase("double_buffered", DOUBLE_BUFFERED, product, (numbers(9, 21), numbers(21, 10)), TILED),
    KernelCase(
        "matvec",
        MATVEC,
        by_vector,
        (numbers(5, 70), numbers(70)),
        {"grid": "ceil(a.shape[0] / 2)", "block": 64},
    ),
    KernelCase("spmv", SPMV, sparse_product, SPARSE, {"grid": 1, "block": 32}),
    KernelCase(
        "stencil_1d", STENCIL_1D, of_seven, (numbers(76),), {"grid": "ceil(result.numel / 32)", "block": 32}
    ),
    KernelCase("heat", HEAT, heated, (numbers(11, 18), 0.1), OF_EIGHT),
    KernelCase("stencil_3d", STENCIL_3D, laplacian, (numbers(5, 6, 9),), PLANES),
    KernelCase("convolution", CONVOLUTION, blurred, (numbers(15, 20),), OF_TWELVE),
    KernelCase("separable", SEPARABLE, smoothed, (numbers(2, 7, 9),), IMAGES),
    KernelCase(
        "im2col", IM2COL, columns, (numbers(2, 5, 6),), {"grid": 1, "block": 32, "constants": {"K": "3"}}
    ),
    KernelCase("pool", POOL, pooled, (numbers(2, 2, 5, 7),), POOLS),
    KernelCase(
        "nbody", NBODY, forces, (numbers(40, 4),), {"grid": "ceil(bodies.shape[0] / 32)", "block": 32}
    ),
]
_CASES = {each.name: each for each in RIGHT}


def wrong(right: str, name: str, cause: str, before: str, after: str, **launch: object) -> KernelCase:
    return with_fault(_CASES[right], name, cause, before, after, launch)


WRONG = [
    wrong(
        "transpose_rows",
        "rows_skipped",
        "uninitialized",
        "j += BLOCK_ROWS)\n    if (x < height",
        "j += 2 * BLOCK_ROWS)\n    if (x < height",
    ),
    wrong(
        "transpose_rows",
        "width_for_height",
        "wrong values",
        "odata[(y + j) * height + x]",
        "odata[(y + j) % width * height + (x + 1) % height]",
    ),
    wrong(
        "transpose_rows",
        "old_block",
        "out-of-bounds",
        "if (x < height && y + j < width) odata[(y + j) * height + x]",
        "if (x < width && y + j < height) odata[(y + j) * width + x + height]",
    ),
    wrong(
        "transpose_fours",
        "tile_at_odd_floats",
        "misaligned",
        "float4 w;",
        "float4 w = *reinterpret_cast<float4*>(&tile[threadIdx.y][threadIdx.x * 4]);",
    ),
    wrong("transpose_fours", "index_in_floats", "out-of-bounds", "[(row * m + col) / 4]", "[row * m + col]"),
    wrong("sgemm", "tile_still_in_use", "race", "__syncthreads();  // used", ""),
    wrong("sgemm", "tile_not_there", "race", "__syncthreads();  // loaded", ""),
    wrong(
        "sgemm",
        "tile_of_a_too_small",
        "out-of-bounds",
        "__shared__ float As[BM * BK];",
        "__shared__ float As[BM * BK / 2];",
    ),
    wrong(
        "sgemm",
        "results_not_zeroed",
        "wrong values",
        "float threadResults[TM] = {0.0};",
        "float threadResults[TM];",
    ),
    wrong(
        "sgemm",
        "one_result_too_many",
        "out-of-bounds",
        "resIdx < TM; ++resIdx) {\n        threadResults",
        "resIdx <= TM; ++resIdx) {\n        threadResults",
    ),
    wrong("sgemm", "half_of_the_threads", "uninitialized", "// used", "", block=32),
    wrong("double_buffered", "no_swap", "wrong values", "buf ^= 1;", ""),
    wrong("double_buffered", "swap_without_barrier", "race", "__syncthreads();  // swap", ""),
    wrong("double_buffered", "rest_of_k_dropped", "wrong values", "(K + TS - 1) / TS", "K / TS"),
    wrong("double_buffered", "k_not_tested", "out-of-bounds", "(kb < K && col < N)", "(col < N)"),
    wrong("matvec", "warps_behind_the_rows", "out-of-bounds", "if (warp_id >= A.size(0)) return;", ""),
    wrong("matvec", "one_step_left_out", "wrong values", "acc += __shfl_xor_sync(0xffffffff, acc, 4);", ""),
    wrong("matvec", "rows_by_thread", "race", "/ 32;", "/ 64;"),
    wrong("spmv", "row_after_the_last", "out-of-bounds", "if (row < n) {", "if (row <= n) {"),
    wrong(
        "spmv",
        "segments_of_the_warp",
        "wrong values",
        "__shfl_down_sync(0xffffffff, sum, 2, 4)",
        "__shfl_down_sync(0xffffffff, sum, 2 * (lane + 1))",
    ),
    wrong(
        "spmv",
        "idle_rows_do_not_shuffle",
        "divergent-barrier",
        "    for (int64_t j",
        "    sum = __shfl_sync(0xffffffff, sum, 0);\n    for (int64_t j",
    ),
    wrong(
        "stencil_1d",
        "halo_not_loaded",
        "uninitialized",
        "if (threadIdx.x < RADIUS) {",
        "if (threadIdx.x < RADIUS - 1) {",
    ),
    wrong(
        "stencil_1d",
        "no_room_for_the_halo",
        "out-of-bounds",
        "temp[BLOCK_SIZE + 2 * RADIUS];",
        "temp[BLOCK_SIZE + RADIUS];",
    ),
    wrong(
        "stencil_1d",
        "unsigned_neighbour",
        "out-of-bounds",
        "in[gindex - RADIUS];",
        "in[(threadIdx.x + blockIdx.x * blockDim.x - 1u) * 1u];",
    ),
    wrong("stencil_1d", "loaded_without_barrier", "race", "__syncthreads();", ""),
    wrong("heat", "border_behind_the_grid", "out-of-bounds", "i + 8 < h && j < w ?", "j < w ?"),
    wrong(
        "heat",
        "halo_of_the_right_side",
        "uninitialized",
        "s[ty][9] = j + 8",
        "if (blockIdx.x == 0) s[ty][9] = j + 8",
    ),
    wrong(
        "heat",
        "barrier_for_the_inside",
        "divergent-barrier",
        "  __syncthreads();\n  if (inside) {",
        "  if (inside) {\n    __syncthreads();",
    ),
    wrong(
        "heat",
        "in_place",
        "mutates-input",
        "next[IDX(i, j)] = middle",
        "const_cast<float*>(u.data)[IDX(i, j)] = next[IDX(i, j)] = middle",
    ),
    wrong(
        "stencil_3d",
        "front_of_the_last_plane",
        "out-of-bounds",
        "z + 1 < nz ? in[at + plane]",
        "z < nz ? in[at + plane]",
    ),
    wrong(
        "stencil_3d",
        "plane_too_short",
        "race",
        "const int plane = nx * ny;",
        "const int plane = nx * (ny - 1);",
    ),
    wrong("convolution", "ghosts_not_zeroed", "uninitialized", "N_ds[ty][tx] = 0.0f;  // ghost", ""),
    wrong("convolution", "whole_block_computes", "out-of-bounds", "if (ty < TILE && tx < TILE) {", "{"),
    wrong(
        "convolution",
        "two_blocks_overlap",
        "race",
        "__syncthreads();\n  float output",
        "__syncthreads();\n  if (row_o < height && col_o < width) P[row_o * width + col_o] = 0;\n"
        "  float output",
    ),
    wrong("separable", "columns_before_rows", "race", "__syncthreads();  // rows", ""),
    wrong(
        "separable", "shared_for_halves", "out-of-bounds", "// rows", "", shared="x.shape[1] * x.shape[2] * 2"
    ),
    wrong("im2col", "left_of_the_image", "out-of-bounds", "y >= 0 && x >= 0 &&", "x >= 0 &&"),
    wrong(
        "im2col",
        "no_grid_stride",
        "uninitialized",
        "i += blockDim.x * gridDim.x)",
        "i += 2 * blockDim.x * gridDim.x)",
    ),
    wrong(
        "im2col",
        "stride_of_the_output",
        "out-of-bounds",
        "(c * K * K) * (H * W) + h * W + w",
        "(c * K * K) * (H * W) + h * W + w + W",
    ),
    wrong("pool", "window_behind_the_image", "out-of-bounds", "h < x.size(2) && w < x.size(3) && x(n", "x(n"),
    wrong("pool", "best_of_zero", "wrong values", "T best = -INFINITY;", "T best = 0;"),
    wrong(
        "pool",
        "indices_of_some",
        "uninitialized",
        "which(n, c, oh, ow) = at;",
        "if (at % 2) which(n, c, oh, ow) = at;",
    ),
    wrong("nbody", "tile_replaced_early", "race", "__syncthreads();  // next", ""),
    wrong("nbody", "tile_read_early", "race", "__syncthreads();  // tile", ""),
    wrong(
        "nbody",
        "last_tile",
        "out-of-bounds",
        "other < N ? positions[other] : make_float4(0.f, 0.f, 0.f, 0.f)",
        "positions[other]",
    ),
]
