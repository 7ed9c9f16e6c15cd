// Rotates pairs of numbers. A block rotates a token; its threads cover the pairs of a head (x) and the heads
// (y).
#include "rows.cuh"

// Rotates pairs i N to i N + N - 1 of a head. The two numbers of a pair are adjacent, or R/2 apart.
template <int N, bool INTERLEAVED, class T, class A>
__device__ void turn_at(int64_t i, int64_t half, const Row<T>& row, const Row<const A>& cos, const Row<const A>& sin) {
  constexpr int OF_TABLE = N == 1 ? 1 : PACK<A>;
  const int64_t first = INTERLEAVED ? 2 * i : i, second = INTERLEAVED ? 2 * i + 1 : i + half / N;
  A x[2][N], turned[2][N], c[N / OF_TABLE][OF_TABLE], s[N / OF_TABLE][OF_TABLE];
  row.load(first, x[0]);
  row.load(second, x[1]);
#pragma unroll
  for (int q = 0; q < N / OF_TABLE; q++) {
    cos.load(i * (N / OF_TABLE) + q, c[q]);
    sin.load(i * (N / OF_TABLE) + q, s[q]);
  }
#pragma unroll
  for (int p = 0; p < N; p++) {
    const int one = INTERLEAVED ? 2 * p : p, other = INTERLEAVED ? 2 * p + 1 : p + N;
    const A a = x[one / N][one % N], b = x[other / N][other % N];
    const A by_cos = c[p / OF_TABLE][p % OF_TABLE], by_sin = s[p / OF_TABLE][p % OF_TABLE];
    turned[one / N][one % N] = a * by_cos - b * by_sin;
    turned[other / N][other % N] = b * by_cos + a * by_sin;
  }
  row.store(first, turned[0]);
  row.store(second, turned[1]);
}

template <int N, class T, class A>
__device__ void turn(const View<T>& x, const View<const A, 2>& cos_sin, int64_t token, int64_t position,
                     bool interleaved) {
  const int64_t heads = x.size(-2), half = cos_sin.size(1) / 2;
  const Rows<T> rows(x);
  const Row<const A> cos{&cos_sin(position, int64_t(0)), cos_sin.stride(1)};
  const Row<const A> sin{cos.data + half * cos.stride, cos.stride};
  for (int64_t head = threadIdx.y; head < heads; head += blockDim.y) {
    const Row<T> row = rows(token * heads + head);
    for (int64_t i = threadIdx.x; i < half / N; i += blockDim.x) {
      if (interleaved)
        turn_at<N, true>(i, half, row, cos, sin);
      else
        turn_at<N, false>(i, half, row, cos, sin);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(256)
rope_(View<T> x, View<const Wide<T>, 2> cos_sin, View<const int64_t> positions, bool interleaved) {
  const int64_t token = blockIdx.x, position = element(positions, token);
  assert(position >= 0 && position < cos_sin.size(0));
  if (cos_sin.size(1) / 2 % PACK<T> == 0 && each_row_in_packs(x) && each_row_in_packs(cos_sin))
    turn<PACK<T>>(x, cos_sin, token, position, interleaved);
  else
    turn<1>(x, cos_sin, token, position, interleaved);
}
