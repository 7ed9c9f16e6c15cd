// Involution: each pixel of the result is the sum of the pixels around it, weighted by the kernel of that
// pixel.
//
// A block computes a tile of one group of one image: `blockDim.y` strips across and `blockDim.z` rows, with
// `blockDim.x` threads for each strip, which share its channels. These threads are neighbours, so that one
// request reads a weight for all of them. A weight is read once for the whole group, or once for each 16
// channels of a larger group. tiles.py chooses the size of tiles.
#include "involution.cuh"

using namespace tiled;

// Any kernel and step: a pixel to a thread, and C channels.
template <int C, class T>
__device__ void any_forward(const View<const T, 4>& input, const View<const T, 6>& weight,
                            const List<int64_t, 2>& stride, const List<int64_t, 2>& padding,
                            const List<int64_t, 2>& dilation, const View<T, 4>& result) {
  using A = Computed<T>;
  const int64_t G = weight.size(1), P = weight.size(4), Q = weight.size(5);
  const int64_t channels = input.size(1) / G, chunks = (channels + C - 1) / C;
  OPSMITH_EACH(at, input.size(0) * G * chunks * P * Q) {
    const int64_t j = at % Q, i = at / Q % P, first = at / Q / P % chunks * C;
    const int64_t g = at / Q / P / chunks % G, b = at / Q / P / chunks / G;
    A sums[C] = {};
    for (int64_t u = 0; u < weight.size(2); u++)
      for (int64_t v = 0; v < weight.size(3); v++) {
        const A by = A(weight(b, g, u, v, i, j));
        const int64_t y = i * stride[0] + u * dilation[0] - padding[0];
        const int64_t x = j * stride[1] + v * dilation[1] - padding[1];
        const bool inside = y >= 0 && y < input.size(2) && x >= 0 && x < input.size(3);
#pragma unroll
        for (int c = 0; c < C; c++) {  // outside times zero, as in the reference: an inf weight gives nan
          const bool is_there = inside && first + c < channels;
          sums[c] += by * (is_there ? A(input(b, g * channels + first + c, y, x)) : A(0));
        }
      }
#pragma unroll
    for (int c = 0; c < C; c++)
      if (first + c < channels) result(b, g * channels + first + c, i, j) = T(sums[c]);
  }
}

// Number of vectors in a thread's registers: weights, sums and a window.
template <class A, int K, int S, int D, int SHIFT, int C>
constexpr int held = K + C + S * window_vectors<K, S, D, SHIFT, A>;

// K, S, D: taps, stride and dilation across; K of 0 stands for any. SHIFT: columns before those that the taps
// meet, so that a tile begins at a multiple of a strip. C: channels of a thread.
template <class T, int K, int S, int D, int SHIFT, int C>
__global__ void __launch_bounds__(128, at_once<T, held<Computed<T>, K, S, D, SHIFT, C>, S == 1>)
involution(View<const T, 4> input, View<const T, 6> weight, List<int64_t, 2> stride, List<int64_t, 2> padding,
           List<int64_t, 2> dilation, View<T, 4> result) {
  if constexpr (K == 0) {
    any_forward<C>(input, weight, stride, padding, dilation, result);
  } else {
    using A = Computed<T>;
    constexpr int N = strip<A>, VECTORS = window_vectors<K, S, D, SHIFT, A>;
    const int lanes = blockDim.x, strips = blockDim.y, rows = blockDim.z, lane = threadIdx.x;
    const int G = weight.size(1), U = weight.size(2), P = weight.size(4), Q = weight.size(5);
    const int channels = int(input.size(1)) / G, step = stride[0], gap = dilation[0];
    const Place at(over(channels, lanes * C), over(Q, strips * N), over(P, rows), G);
    const int top = at.down * rows, left = at.across * strips * N, first = at.piece * lanes * C;
    const int i = top + threadIdx.z, j = left + threadIdx.y * N;
    const T* const weights = weight.data + at.batch * weight.stride(0) + at.group * weight.stride(1);

    // One thread for each tap of a row and each row of the tile prefetches its weights.
    const int ahead = thread(), fetched_row = top + ahead % rows;
    const int fetched_last = min(strips * N, Q - left) - 1;
    const bool fetches = weight.stride(5) == 1 && ahead < K * rows && fetched_row < P;
    const T* fetched = weights + ahead / rows * weight.stride(3) + fetched_row * weight.stride(4) + left;
    if (fetches) fetch_ahead(fetched, fetched_last);
    if (fetches && U > 1) fetch_ahead(fetched + weight.stride(2), fetched_last);

    const int staged = (rows - 1) * step + (U - 1) * gap + 1;
    const Layout lies = layout(strips - 1 + VECTORS, S, staged, step, strips, lanes);
    A* const tile = opsmith::shared_memory<A>();
    stage<S>(input, at.batch, at.group * int64_t(channels) + first, lanes * C, channels - first,
             top * step - int(padding[0]), staged, left * S - int(padding[1]) - SHIFT, lies, tile);
    __syncthreads();
    if (i >= P || j >= Q) return;

    A sums[C][N] = {};
    const int mine = channels - first - lane;  // number of existing channels, from this thread's first on
    const int64_t channel = at.group * int64_t(channels) + first + lane;
    T* to = result.data + at.batch * result.stride(0) + channel * result.stride(1) + i * result.stride(2) +
            j * result.stride(3);
    const bool result_in_strips = in_strips<N>(result);
    const bool weights_in_strips = in_strips<N>(weight);
    const T* row_of_taps = weights + i * weight.stride(4) + j * weight.stride(5);
    const A* line = tile + (lane * lies.plane + threadIdx.z * step * lies.row + threadIdx.y) * N;
#pragma unroll 1
    for (int u = 0; u < U; u++, row_of_taps += weight.stride(2), line += gap * lies.row * N) {
      A by[K][N];
      const T* tap = row_of_taps;
      if (weights_in_strips) {
#pragma unroll
        for (int v = 0; v < K; v++, tap += weight.stride(3)) load_strip<0>(tap, 0, N, by[v]);
      } else {
#pragma unroll
        for (int v = 0; v < K; v++, tap += weight.stride(3)) load_numbers(tap, j, Q, weight.stride(5), by[v]);
      }
      if (fetches && u + 2 < U) fetch_ahead(fetched + 2 * weight.stride(2), fetched_last);
      fetched += weight.stride(2);
      const A* plane = line;
#pragma unroll
      for (int c = 0; c < C; c++, plane += lanes * lies.plane * N) {
        Window<K, S, D, SHIFT, A> window;
        window.load(plane, lies.line);
#pragma unroll
        for (int v = 0; v < K; v++)
#pragma unroll
          for (int p = 0; p < N; p++) sums[c][p] += by[v][p] * window.of(v, p);
      }
    }
#pragma unroll
    for (int c = 0; c < C; c++, to += lanes * result.stride(1))
      if (c * lanes < mine) store_strip<N>(to, j, Q, result.stride(3), result_in_strips, sums[c]);
  }
}
