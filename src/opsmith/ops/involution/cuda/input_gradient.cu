// The gradient of involution by its input: each pixel of the image gathers the cotangent of all pixels whose
// windows contain it, weighted by their kernels. Each thread adds alone to its pixel, so the results are
// deterministic.
//
// In columns counted with the padding, tap v of column j meets column j S + v D = t S + phase, with j = t -
// floor(v D / S) and phase = v D mod S. A thread computes S strips of columns, all phases of a strip of t: so
// every weight of a row of taps has a place to go, and the window is that of an involution with a stride of
// 1.
#include "involution.cuh"

using namespace tiled;

// Number of columns that the last tap looks back.
template <int K, int S, int D>
constexpr int reach = K > 0 ? (K - 1) * D / S : 0;

// Number of vectors in a thread's registers: weights, sums and a window.
template <class A, int K, int S, int D, int SHIFT, int C>
constexpr int held_gathering = K + C * S + window_vectors<reach<K, S, D> + 1, 1, 1, SHIFT, A>;

// Any kernel and step: a pixel to a thread, and C channels.
template <int C, class T>
__device__ void any_input_gradient(const View<const T, 4>& cotangent, const View<const T, 6>& weight,
                                   const List<int64_t, 2>& stride, const List<int64_t, 2>& padding,
                                   const List<int64_t, 2>& dilation, const View<T, 4>& result) {
  using A = Computed<T>;
  const int64_t G = weight.size(1), H = result.size(2), W = result.size(3);
  const int64_t channels = result.size(1) / G, chunks = (channels + C - 1) / C;
  OPSMITH_EACH(at, result.size(0) * G * chunks * H * W) {
    const int64_t x = at % W, y = at / W % H, first = at / W / H % chunks * C;
    const int64_t g = at / W / H / chunks % G, b = at / W / H / chunks / G;
    A sums[C] = {};
    for (int64_t u = 0; u < weight.size(2); u++) {
      const int64_t above = y + padding[0] - u * dilation[0], i = above / stride[0];
      if (above < 0 || i * stride[0] != above || i >= weight.size(4)) continue;
      for (int64_t v = 0; v < weight.size(3); v++) {
        const int64_t before = x + padding[1] - v * dilation[1], j = before / stride[1];
        if (before < 0 || j * stride[1] != before || j >= weight.size(5)) continue;
        const A by = A(weight(b, g, u, v, i, j));
#pragma unroll
        for (int c = 0; c < C; c++)
          if (first + c < channels) sums[c] += by * A(cotangent(b, g * channels + first + c, i, j));
      }
    }
#pragma unroll
    for (int c = 0; c < C; c++)
      if (first + c < channels) result(b, g * channels + first + c, y, x) = T(sums[c]);
  }
}

template <int K, int S, int D, int C>
constexpr bool is_tried = K == 7 && S == 1 && D == 1 && C == 4;

// As in forward.cu. `blockDim.z` rows of the image; SHIFT: columns before the first that a strip of t meets.
template <class T, int K, int S, int D, int SHIFT, int C>
__global__ void
__launch_bounds__(128, at_once<T, held_gathering<Computed<T>, K, S, D, SHIFT, C>, is_tried<K, S, D, C>>)
involution_input_gradient(View<const T, 4> cotangent, View<const T, 6> weight, List<int64_t, 2>,
                          List<int64_t, 2> stride, List<int64_t, 2> padding, List<int64_t, 2> dilation,
                          View<T, 4> result) {
  if constexpr (K == 0) {
    any_input_gradient<C>(cotangent, weight, stride, padding, dilation, result);
  } else {
    using A = Computed<T>;
    constexpr int N = strip<A>, REACH = reach<K, S, D>;
    using Taps = Window<REACH + 1, 1, 1, SHIFT, A>;
    const int lanes = blockDim.x, strips = blockDim.y, rows = blockDim.z, lane = threadIdx.x;
    const int G = weight.size(1), U = weight.size(2), P = weight.size(4), Q = weight.size(5);
    const int H = result.size(2), W = result.size(3), channels = int(result.size(1)) / G;
    const int step = stride[0], gap = dilation[0], above = padding[0];
    const int margin = padding[1], begin = margin / S, end = (W - 1 + margin) / S + 1;  // of t
    const Place at(over(channels, lanes * C), over(end - begin, strips * N), over(H, rows), G);
    const int top = at.down * rows, left = begin + at.across * strips * N, first = at.piece * lanes * C;
    const int y = top + threadIdx.z, t = left + threadIdx.y * N, x = t * S - margin;
    const T* const weights = weight.data + at.batch * weight.stride(0) + at.group * weight.stride(1);

    // Rows of taps that meet a row: from the first on each `apart`-th, and each of them `back` rows of the
    // cotangent before.
    int apart = 1;
    while (apart * gap % step) apart++;
    const int back = apart * gap / step;
    auto first_tap = [&](int y) {
      int u = 0;
      while (u < apart && (y + above - u * gap) % step) u++;
      return u < apart ? u : U;
    };
    const int64_t next = apart * weight.stride(2) - back * weight.stride(4);

    // One thread for each tap of a row and each row of the tile prefetches its weights.
    const int ahead = thread(), fetched_row = top + ahead % rows, fetched_begin = left - ahead / rows * D / S;
    const int fetched_from = max(0, fetched_begin);
    const int fetched_last = min(Q, fetched_begin + strips * N) - fetched_from - 1;
    const bool fetches = weight.stride(5) == 1 && ahead < K * rows && fetched_row < H && fetched_last >= 0;
    int fetched_tap = fetches ? first_tap(fetched_row) : U;
    int fetched_i = (fetched_row + above - fetched_tap * gap) / step;
    const T* fetched = weights + fetched_tap * weight.stride(2) + ahead / rows * weight.stride(3) +
                       fetched_i * weight.stride(4) + fetched_from;
    auto fetch_next = [&] {
      if (fetched_tap < U && unsigned(fetched_i) < unsigned(P)) fetch_ahead(fetched, fetched_last);
      fetched_tap += apart, fetched_i -= back, fetched += next;
    };
    fetch_next();
    fetch_next();

    const int lowest = top + above - (U - 1) * gap, row = lowest < 0 ? -(-lowest / step) : over(lowest, step);
    const int staged = (rows - 1 + (U - 1) * gap) / step + 1;
    const Layout lies = layout(strips - 1 + Taps::VECTORS, 1, staged, 1, strips, lanes);
    A* const tile = opsmith::shared_memory<A>();
    stage<1>(cotangent, at.batch, at.group * int64_t(channels) + first, lanes * C, channels - first, row,
             staged, left - REACH - SHIFT, lies, tile);
    __syncthreads();
    if (y >= H || x >= W) return;

    A sums[C][N * S] = {};
    const int mine = channels - first - lane;  // number of existing channels, from this thread's first on
    const int64_t channel = at.group * int64_t(channels) + first + lane;
    T* to = result.data + at.batch * result.stride(0) + channel * result.stride(1) + y * result.stride(2) +
            x * result.stride(3);
    const bool result_in_strips = in_strips<N>(result) && x % N == 0;
    const bool weights_in_strips = in_strips<N>(weight) && (begin - REACH - SHIFT) % N == 0;
    int u = first_tap(y), i = (y + above - u * gap) / step;
    const T* row_of_taps = weights + u * weight.stride(2) + i * weight.stride(4) + t * weight.stride(5);
    const A* line = tile + (lane * lies.plane + (i - row) * lies.row + threadIdx.y) * N;
#pragma unroll 1
    for (; u < U; u += apart, i -= back, row_of_taps += next, line -= back * lies.row * N) {
      fetch_next();
      if (unsigned(i) >= unsigned(P)) continue;
      A by[K][N];
      const T* tap = row_of_taps;
      if (weights_in_strips) {
#pragma unroll
        for (int v = 0; v < K; v++, tap += weight.stride(3)) {
          // The compiler knows the column modulo a strip, because it knows v.
          const int past = v * D / S, remainder = (SHIFT + REACH + N - past % N) % N;
          if (remainder == 0) load_strip<0>(tap - past, t - past, Q, by[v]);
          else if (remainder % 2 == 0) load_strip<2>(tap - past, t - past, Q, by[v]);
          else load_strip<1>(tap - past, t - past, Q, by[v]);
        }
      } else {
#pragma unroll
        for (int v = 0; v < K; v++, tap += weight.stride(3))
          load_numbers(tap - v * D / S * weight.stride(5), t - v * D / S, Q, weight.stride(5), by[v]);
      }
      const A* plane = line;
#pragma unroll
      for (int c = 0; c < C; c++, plane += lanes * lies.plane * N) {
        Taps window;
        window.load(plane, lies.line);
#pragma unroll
        for (int v = 0; v < K; v++)
#pragma unroll
          for (int p = 0; p < N; p++)
            sums[c][p * S + v * D % S] += by[v][p] * window.of(REACH - v * D / S, p);
      }
    }
#pragma unroll
    for (int c = 0; c < C; c++, to += lanes * result.stride(1))
      if (c * lanes < mine) store_strip<N * S>(to, x, W, result.stride(3), result_in_strips, sums[c]);
  }
}
