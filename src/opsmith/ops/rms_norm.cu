// Normalisation of rows: a warp computes a short row, and a block of 256 threads a longer one. It reads a row
// twice, from memory and then from the cache.
#include "rows.cuh"

// A weight of ones, if there is no weight.
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

// Writes x scale weight into y. A thread reads no element of x that a different thread has written.
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
      number[p] = A(T(number[p] + old[p]));  // the number in the residual, rounded
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

// Number of rows that the threads of a row read together, so that more memory requests run at once.
constexpr int TOGETHER = 4;

// Gradients of rows from row `first` on. With n = x rstd and g = grad weight, grad_x is
// rstd (g - n mean(g n)). Their part of grad_weight initialises `sums`, or is added to it.
template <int N, bool EVENLY, class T, class A>
__device__ void rows_backward(const Rows<const T>& grads, const Rows<const T>& x, const Weight<T>& weight,
                              const Rows<const A>& rstd, int64_t first, int64_t count, int64_t n,
                              const Rows<T>& grad_x, bool begins, const Row<A>& sums) {
  A along[TOGETHER] = {}, scale[TOGETHER];
  // After the last row this row is read again, without effect.
  const auto row = [=](int r) { return min(first + r, count - 1); };
  for (int64_t i = threadIdx.x; i < n / N; i += blockDim.x) {
    A by[N];
    weight.load(i, by);
#pragma unroll
    for (int r = 0; r < TOGETHER; r++) {
      A g[N], number[N];
      grads.template at<EVENLY>(row(r)).load(i, g);
      x.template at<EVENLY>(row(r)).load(i, number);
#pragma unroll
      for (int p = 0; p < N; p++) along[r] += g[p] * by[p] * number[p];
    }
  }
  sum_over_row(along);
#pragma unroll
  for (int r = 0; r < TOGETHER; r++) {
    scale[r] = rstd.template at<EVENLY>(row(r))[0];
    along[r] *= scale[r] * scale[r] / A(n);
  }
  for (int64_t i = threadIdx.x; i < n / N; i += blockDim.x) {
    A by[N], sum[N] = {};
    weight.load(i, by);
    if (!begins) sums.load(i, sum);
#pragma unroll
    for (int r = 0; r < TOGETHER; r++) {
      A g[N], number[N];
      grads.template at<EVENLY>(row(r)).load(i, g);
      x.template at<EVENLY>(row(r)).load(i, number);
      if (first + r >= count) continue;
#pragma unroll
      for (int p = 0; p < N; p++) {
        sum[p] += g[p] * number[p] * scale[r];
        g[p] = scale[r] * (g[p] * by[p] - number[p] * along[r]);
      }
      grad_x.template at<EVENLY>(first + r).store(i, g);
    }
    sums.store(i, sum);
  }
}

// A group of threads computes several rows in turn. It has a row of `sums` for its part of grad_weight.
template <class T>
__global__ void __launch_bounds__(256, 2)
rms_norm_backward(View<const T> grad, View<const T> x, View<const T, 1> weight, View<const Wide<T>> rstd,
                  View<T> grad_x, Contiguous<Wide<T>, 2> sums) {
  const int64_t n = x.size(-1), count = rstd.numel();
  const Rows<const T> grads(grad), numbers(x);
  const Rows<const Wide<T>> scales(rstd);
  const Rows<T> to(grad_x);
  const Weight<T> by(weight);
  const int64_t own = row_of_thread();
  const Row<Wide<T>> sum{&sums(own, int64_t(0)), 1};
  const bool in_packs = n % PACK<T> == 0 && each_row_in_packs(grad) && each_row_in_packs(x) &&
                        each_row_in_packs(grad_x) && by.in_packs();
  const bool evenly = grads.evenly && numbers.evenly && scales.evenly && to.evenly;
  if (own * TOGETHER >= count)
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum[i] = 0;
  for (int64_t first = own * TOGETHER; first < count; first += sums.size(0) * TOGETHER) {
    const bool begins = first == own * TOGETHER;
    if (in_packs && evenly)
      rows_backward<PACK<T>, true>(grads, numbers, by, scales, first, count, n, to, begins, sum);
    else
      rows_backward<1, false>(grads, numbers, by, scales, first, count, n, to, begins, sum);
  }
}

// Number of columns of a block: 32 bytes, as much as a GPU reads at once.
template <class T> constexpr int STRIP = 32 / sizeof(T);

// Sums columns, always in the same order.
template <class T>
__global__ void __launch_bounds__(256)
sum_of_rows(Contiguous<const Wide<T>, 2> sums, View<T, 1> grad_weight) {
  using A = Wide<T>;
  constexpr int COLUMNS = STRIP<A>, ROWS = 256 / COLUMNS;
  const int lane = threadIdx.x / COLUMNS, place = threadIdx.x % COLUMNS;
  const int64_t column = int64_t(blockIdx.x) * COLUMNS + place;
  A sum = 0;
  if (column < grad_weight.size(0)) {
#pragma unroll 4
    for (int64_t row = lane; row < sums.size(0); row += ROWS) sum += sums(row, column);
  }
  __shared__ A parts[ROWS][COLUMNS];
  parts[lane][place] = sum;
  for (int half = ROWS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) parts[lane][place] += parts[lane + half][place];
  }
  if (lane == 0 && column < grad_weight.size(0)) grad_weight(column) = T(parts[0][place]);
}
