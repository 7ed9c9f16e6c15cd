// The gradient of involution by its weight: for each tap of each pixel, the sum over the channels of its
// group of the pixel's cotangent, times the pixel under the tap.
//
// A block computes a tile of one group of one image: `blockDim.x` strips across, `blockDim.y` rows, and
// `blockDim.z` rows of taps at once. A thread holds the sums of a row of taps in registers while C channels
// after C channels of the image and of the cotangent go through shared memory; each sum is written once.
#include "involution.cuh"

using namespace tiled;

// Any kernel and step: a sum to a thread.
template <class T>
__device__ void any_weight_gradient(const View<const T, 4>& cotangent, const View<const T, 4>& input,
                                    const List<int64_t, 2>& stride, const List<int64_t, 2>& padding,
                                    const List<int64_t, 2>& dilation, const View<T, 6>& result) {
  using A = Computed<T>;
  const int64_t G = result.size(1), U = result.size(2), V = result.size(3);
  const int64_t P = result.size(4), Q = result.size(5), channels = input.size(1) / G;
  OPSMITH_EACH(at, result.numel()) {
    const int64_t j = at % Q, i = at / Q % P, v = at / Q / P % V, u = at / Q / P / V % U;
    const int64_t g = at / Q / P / V / U % G, b = at / Q / P / V / U / G;
    const int64_t y = i * stride[0] + u * dilation[0] - padding[0];
    const int64_t x = j * stride[1] + v * dilation[1] - padding[1];
    const bool inside = y >= 0 && y < input.size(2) && x >= 0 && x < input.size(3);
    A sum = 0;
    for (int64_t c = g * channels; c < (g + 1) * channels; c++)  // outside times zero, as in the reference
      sum += A(cotangent(b, c, i, j)) * (inside ? A(input(b, c, y, x)) : A(0));
    result(b, g, u, v, i, j) = T(sum);
  }
}

// Blocks of 256 threads that have to fit on a multiprocessor, as in involution.cuh: 80 registers with 3
// blocks, 255 with 1. 3 blocks are used only where this was tried.
template <class T, int K, int S, int D, int C, int IN_PIECES>
constexpr int blocks = K == 7 && S <= 2 && D == 1 && C == 16 && !IN_PIECES && sizeof(T) <= 4 ? 3 : 1;

// True if tiles are copied to shared memory again for each row of taps. If all channels of a group are there
// at once, this is unnecessary; but without it the variant with 3 blocks would need 80 registers instead of
// 72, and its tiles process all rows of taps at once.
template <class T, int K, int S, int D, int C, int IN_PIECES>
constexpr bool stages_again = IN_PIECES || blocks<T, K, S, D, C, IN_PIECES> > 1;

// As in forward.cu, except C: number of channels in shared memory at once. IN_PIECES: true if a group has
// more channels.
template <class T, int K, int S, int D, int SHIFT, int C, int IN_PIECES>
__global__ void __launch_bounds__(256, blocks<T, K, S, D, C, IN_PIECES>)
involution_weight_gradient(View<const T, 4> cotangent, View<const T, 4> input, int64_t, List<int64_t, 2>,
                           List<int64_t, 2> stride, List<int64_t, 2> padding, List<int64_t, 2> dilation,
                           View<T, 6> result) {
  if constexpr (K == 0) {
    any_weight_gradient(cotangent, input, stride, padding, dilation, result);
  } else {
    using A = Computed<T>;
    constexpr int N = strip<A>, VECTORS = window_vectors<K, S, D, SHIFT, A>;
    const int strips = blockDim.x, rows = blockDim.y, taps = blockDim.z;
    const int G = result.size(1), U = result.size(2), P = result.size(4), Q = result.size(5);
    const int channels = int(input.size(1)) / G, step = stride[0], gap = dilation[0];
    const Place at(1, over(Q, strips * N), over(P, rows), G);
    const int top = at.down * rows, left = at.across * strips * N;
    const int i = top + threadIdx.y, j = left + threadIdx.x * N;

    const int staged = (rows - 1) * step + (U - 1) * gap + 1;
    const Layout lies = layout(strips - 1 + VECTORS, S, staged, step, strips, 1);
    const Layout came = layout(strips, 1, rows, 1, strips, 1);
    const int row = top * step - int(padding[0]), column = left * S - int(padding[1]) - SHIFT;
    const bool result_in_strips = in_strips<N>(result);
    A* const image_tile = opsmith::shared_memory<A>();
    A* const came_tile = image_tile + C * lies.plane * N;
    const A* const came_at = came_tile + (threadIdx.y * came.row + threadIdx.x) * N;
    auto stage_both = [&](int first, int some) {
      const int64_t channel = at.group * int64_t(channels) + first;
      stage<S>(input, at.batch, channel, C, some, row, staged, column, lies, image_tile);
      stage<1>(cotangent, at.batch, channel, C, some, top, rows, left, came, came_tile);
      __syncthreads();
    };
    constexpr bool AGAIN = stages_again<T, K, S, D, C, IN_PIECES>;
    if constexpr (!AGAIN) stage_both(0, C);
    for (int u = threadIdx.z, round = 0; round < U; u += taps, round += taps) {
      const bool is_there = i < P && j < Q && u < U;
      const A* const window_at = image_tile + ((threadIdx.y * step + u * gap) * lies.row + threadIdx.x) * N;
      A sums[K][N] = {};
      for (int first = 0; first < (IN_PIECES ? channels : 1); first += C) {
        const int some = AGAIN ? min(C, channels - first) : C;
        if constexpr (AGAIN) {
          if (round > 0 || first > 0) __syncthreads();
          stage_both(first, some);
        }
        if (!is_there) continue;
        const A *meets = window_at, *comes = came_at;
#pragma unroll 2
        for (int c = 0; c < some; c++, meets += lies.plane * N, comes += came.plane * N) {
          Window<K, S, D, SHIFT, A> window;
          window.load(meets, lies.line);
          const auto by = *reinterpret_cast<const Pack<A, N>*>(comes);
#pragma unroll
          for (int v = 0; v < K; v++)
#pragma unroll
            for (int p = 0; p < N; p++) sums[v][p] += by.at[p] * window.of(v, p);
        }
      }
      if (!is_there) continue;
      T* const to = result.data + at.batch * result.stride(0) + at.group * result.stride(1) +
                    u * result.stride(2) + i * result.stride(4) + j * result.stride(5);
#pragma unroll
      for (int v = 0; v < K; v++)
        store_strip<N>(to + v * result.stride(3), j, Q, result.stride(5), result_in_strips, sums[v]);
    }
  }
}
