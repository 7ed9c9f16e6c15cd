// Normalisation of rows: a warp computes a short row, and a block of 256 threads a longer one. It reads a row
// twice, from memory and then from the cache.
#include "rows.cuh"

// A weight of ones, where there is none.
template <class T>
struct Weight : Row<const T> {
  __device__ explicit Weight(const View<const T, 1>& given) : Row<const T>{given.data, given.stride(0)} {}
  __device__ explicit Weight(const Optional<View<const T, 1>>& given)
      : Row<const T>{given ? given->data : nullptr, given ? given->stride(0) : 1} {}

  template <class A, int N>
  __device__ void load(int64_t i, A (&to)[N]) const {
    if (this->data) return Row<const T>::load(i, to);
#pragma unroll
    for (int p = 0; p < N; p++) to[p] = 1;
  }
};

template <class A>
__device__ A root_of_mean(A squares, int64_t n, double eps) {
  return rsqrt(squares / A(n) + A(eps));
}

// Writes x scale weight into y. A thread reads no element of x that another one has written.
template <int N, class X, class T, class A>
__device__ void write_scaled(const Row<X>& x, const Weight<T>& weight, int64_t n, A scale, const Row<T>& y) {
  for (int64_t i = threadIdx.x; i < n / N; i += blockDim.x) {
    A number[N], by[N];
    x.load(i, number);
    weight.load(i, by);
#pragma unroll
    for (int p = 0; p < N; p++) number[p] = number[p] * scale * by[p];
    y.store(i, number);
  }
}

template <int N, class T>
__device__ Wide<T> normalise(const Row<const T>& x, const Weight<T>& weight, int64_t n, double eps,
                             const Row<T>& y) {
  using A = Wide<T>;
  A squares = 0;
  for (int64_t i = threadIdx.x; i < n / N; i += blockDim.x) {
    A number[N];
    x.load(i, number);
#pragma unroll
    for (int p = 0; p < N; p++) squares += number[p] * number[p];
  }
  const A scale = root_of_mean(sum_over_row(squares), n, eps);
  write_scaled<N>(x, weight, n, scale, y);
  return scale;
}

template <class T>
__global__ void __launch_bounds__(256)
rms_norm(View<const T> x, Optional<View<const T, 1>> weight, double eps, View<T> y, View<Wide<T>> rstd) {
  const int64_t row = row_of_thread(), n = x.size(-1);
  if (row >= rstd.numel()) return;
  const Row<const T> from = row_of(x, row);
  const Row<T> to = row_of(y, row);
  const Weight<T> by(weight);
  const bool in_packs = n % PACK<T> == 0 && from.in_packs() && to.in_packs() && by.in_packs();
  const Wide<T> scale =
      in_packs ? normalise<PACK<T>>(from, by, n, eps, to) : normalise<1>(from, by, n, eps, to);
  if (threadIdx.x == 0) row_of(rstd, row)[0] = scale;
}

template <int N, class T>
__device__ void add_and_normalise(const Row<T>& x, const Row<T>& residual, const Weight<T>& weight, int64_t n,
                                  double eps) {
  using A = Wide<T>;
  A squares = 0;
  for (int64_t i = threadIdx.x; i < n / N; i += blockDim.x) {
    A number[N], old[N];
    x.load(i, number);
    residual.load(i, old);
#pragma unroll
    for (int p = 0; p < N; p++) {
      number[p] = A(T(number[p] + old[p]));  // what the residual holds, rounded
      squares += number[p] * number[p];
    }
    residual.store(i, number);
  }
  write_scaled<N>(residual, weight, n, root_of_mean(sum_over_row(squares), n, eps), x);
}

template <class T>
__global__ void __launch_bounds__(256)
add_rms_norm_(View<T> x, View<T> residual, Optional<View<const T, 1>> weight, double eps) {
  const int64_t n = x.size(-1), row = row_of_thread();
  if (row >= x.numel() / n) return;
  const Row<T> to = row_of(x, row), sums = row_of(residual, row);
  const Weight<T> by(weight);
  if (n % PACK<T> == 0 && to.in_packs() && sums.in_packs() && by.in_packs())
    add_and_normalise<PACK<T>>(to, sums, by, n, eps);
  else
    add_and_normalise<1>(to, sums, by, n, eps);
}

// With n = x rstd and g = grad weight, grad_x is rstd (g - n mean(g n)).
template <int N, class T, class A>
__device__ void row_backward(const Row<const T>& grad, const Row<const T>& x, const Weight<T>& weight, int64_t n,
                             A scale, const Row<T>& grad_x) {
  A along = 0;
  for (int64_t i = threadIdx.x; i < n / N; i += blockDim.x) {
    A g[N], number[N], by[N];
    grad.load(i, g);
    x.load(i, number);
    weight.load(i, by);
#pragma unroll
    for (int p = 0; p < N; p++) along += g[p] * by[p] * number[p];
  }
  along = sum_over_row(along) * scale * scale / A(n);
  for (int64_t i = threadIdx.x; i < n / N; i += blockDim.x) {
    A g[N], number[N], by[N];
    grad.load(i, g);
    x.load(i, number);
    weight.load(i, by);
#pragma unroll
    for (int p = 0; p < N; p++) g[p] = scale * (g[p] * by[p] - number[p] * along);
    grad_x.store(i, g);
  }
}

// Columns of a strip, which are 32 bytes: as much as a GPU reads at once.
template <class T> constexpr int STRIP = 32 / sizeof(T);

// Rows that a block reads at once, each by as many threads as a strip has columns.
template <class T> constexpr int ROWS = 256 / STRIP<T>;

// Sum of grad x rstd over every ROWS-th row of a column from row `first` on.
template <bool EVENLY, class T>
__device__ Wide<T> sum_of_column(const Rows<const T>& grads, const Rows<const T>& x,
                                 const Rows<const Wide<T>>& rstd, int64_t first, int64_t count, int64_t column) {
  using A = Wide<T>;
  constexpr int64_t BLOCK = 16 * ROWS<T>;  // rows that are summed before they are added to the sum of all: rounding
  A sum = 0;
  for (int64_t begin = first; begin < count; begin += BLOCK) {
    const int64_t end = min(count, begin + BLOCK);
    A block = 0;
#pragma unroll(EVENLY ? 4 : 1)
    for (int64_t row = begin; row < end; row += ROWS<T>)
      block += A(grads.template at<EVENLY>(row)[column]) * A(x.template at<EVENLY>(row)[column]) *
               rstd.template at<EVENLY>(row)[0];
    sum += block;
  }
  return sum;
}

// Sums the columns of a strip over all rows, in the same order each time.
template <class T>
__device__ void strip_backward(const Rows<const T>& grads, const Rows<const T>& x, const Rows<const Wide<T>>& rstd,
                               int64_t count, int64_t first, const View<T, 1>& grad_weight) {
  using A = Wide<T>;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread / STRIP<T>;
  const int64_t column = first + thread % STRIP<T>;
  const bool is_there = column < grad_weight.size(0), evenly = grads.evenly && x.evenly && rstd.evenly;
  A sum = 0;
  if (is_there)
    sum = evenly ? sum_of_column<true>(grads, x, rstd, lane, count, column)
                 : sum_of_column<false>(grads, x, rstd, lane, count, column);
  __shared__ A sums[ROWS<T>][STRIP<T>];
  sums[lane][thread % STRIP<T>] = sum;
  for (int half = ROWS<T> / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) sums[lane][thread % STRIP<T>] += sums[lane + half][thread % STRIP<T>];
  }
  if (lane == 0 && is_there) grad_weight(column) = T(sums[0][thread]);
}

// The first blocks compute the gradient of the weight, each a strip of columns, and all others that of x.
template <class T>
__global__ void __launch_bounds__(256, 3)
rms_norm_backward(View<const T> grad, View<const T> x, View<const T, 1> weight, View<const Wide<T>> rstd,
                  View<T> grad_x, View<T, 1> grad_weight) {
  const int64_t n = x.size(-1), strips = (n + STRIP<T> - 1) / STRIP<T>, count = rstd.numel();
  const Rows<const T> grads(grad), numbers(x);
  const Rows<const Wide<T>> scales(rstd);
  if (blockIdx.x < strips) {
    strip_backward(grads, numbers, scales, count, blockIdx.x * int64_t(STRIP<T>), grad_weight);
    return;
  }
  const int64_t row = row_of_thread() - strips * blockDim.y;
  if (row >= count) return;
  const Row<const T> came = grads(row), from = numbers(row);
  const Row<T> to = row_of(grad_x, row);
  const Weight<T> by(weight);
  const Wide<T> scale = scales(row)[0];
  if (n % PACK<T> == 0 && came.in_packs() && from.in_packs() && to.in_packs() && by.in_packs())
    row_backward<PACK<T>>(came, from, by, n, scale, to);
  else
    row_backward<1>(came, from, by, n, scale, to);
}
