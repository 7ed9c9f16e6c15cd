#include "rows.h"

// Stores n numbers into a row.
template <class T, class Number>
void store(T* row, int64_t stride, int64_t n, Number number) {
  if (stride == 1) {
    for (int64_t i = 0; i < n; i++) row[i] = T(number(i));
  } else {
    for (int64_t i = 0; i < n; i++) row[i * stride] = T(number(i));
  }
}

template <class T>
std::vector<Wide<T>> widened(const std::optional<View<const T, 1>>& weight, int64_t n) {
  std::vector<Wide<T>> wide(size_t(n), Wide<T>(1));
  if (weight)
    for (int64_t i = 0; i < n; i++) wide[size_t(i)] = Wide<T>((*weight)(i));
  return wide;
}

template <class T>
void rms_norm(View<const T> x, std::optional<View<const T, 1>> weight, double eps, View<T> y, View<Wide<T>> rstd) {
  using A = Wide<T>;
  const int64_t n = x.size(-1), count = rstd.numel();
  const Rows<const T> from(x);
  const Rows<T> to(y);
  const Rows<A> scales(rstd);
  const std::vector<A> wide = widened(weight, n);
  const A* w = wide.data();
#pragma omp parallel if (count * n > WORTH_THREADS)
  {
    std::vector<A> buffer(static_cast<size_t>(n));
#pragma omp for
    for (int64_t row = 0; row < count; row++) {
      const A* in = widened(from(row), from.inner, n, buffer.data());
      const A mean = sum_of<A>(n, [=](int64_t i) { return in[i] * in[i]; }) / A(n);
      const A scale = 1 / std::sqrt(mean + A(eps));
      *scales(row) = scale;
      store(to(row), to.inner, n, [=](int64_t i) { return in[i] * scale * w[i]; });
    }
  }
}

template <class T>
void rms_norm_backward(View<const T> grad, View<const T> x, View<const T, 1> weight, View<const Wide<T>> rstd,
                       View<T> grad_x, View<T, 1> grad_weight) {
  using A = Wide<T>;
  constexpr int64_t BLOCK = 64;  // rows that are summed before they are added to the total, for accuracy
  const int64_t n = x.size(-1), count = rstd.numel();
  const Rows<const T> grads(grad), from(x);
  const Rows<const A> scales(rstd);
  const Rows<T> to(grad_x);
  const std::vector<A> wide = widened(std::optional<View<const T, 1>>(weight), n);
  const A* w = wide.data();
  const bool threads = count * n > WORTH_THREADS;
  std::vector<std::vector<A>> sums(size_t(threads ? omp_get_max_threads() : 1));
#pragma omp parallel if (threads)
  {
    std::vector<A> buffer(static_cast<size_t>(n)), grad_buffer(static_cast<size_t>(n)), block(static_cast<size_t>(n));
    std::vector<A> sum(static_cast<size_t>(n));
    A* part = block.data();
    int64_t rows = 0;
    auto add_block = [&] {
      for (int64_t i = 0; i < n; i++) {
        sum[size_t(i)] += part[i];
        part[i] = 0;
      }
      rows = 0;
    };
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; row++) {
      const A* in = widened(from(row), from.inner, n, buffer.data());
      const A* g = widened(grads(row), grads.inner, n, grad_buffer.data());
      const A scale = *scales(row);
      const A along = sum_of<A>(n, [=](int64_t i) { return g[i] * w[i] * in[i]; }) * scale * scale / A(n);
      store(to(row), to.inner, n, [=](int64_t i) { return scale * (g[i] * w[i] - in[i] * along); });
      for (int64_t i = 0; i < n; i++) part[i] += g[i] * in[i] * scale;
      if (++rows == BLOCK) add_block();
    }
    add_block();
    sums[size_t(omp_get_thread_num())] = std::move(sum);
  }
  for (int64_t i = 0; i < n; i++) {
    A total = 0;
    for (const std::vector<A>& each : sums)
      if (!each.empty()) total += each[size_t(i)];
    grad_weight(i) = T(total);
  }
}

template <class T>
void add_rms_norm_(View<T> x, View<T> residual, std::optional<View<const T, 1>> weight, double eps) {
  using A = Wide<T>;
  const int64_t n = x.size(-1), count = n == 0 ? 0 : x.numel() / n;
  const Rows<T> rows(x), sums(residual);
  const std::vector<A> wide = widened(weight, n);
  const A* w = wide.data();
#pragma omp parallel if (count * n > WORTH_THREADS)
  {
    std::vector<A> buffer(static_cast<size_t>(n));
    A* in = buffer.data();
#pragma omp for
    for (int64_t row = 0; row < count; row++) {
      T *to = rows(row), *sum = sums(row);
      const int64_t inner = rows.inner;
      store(sum, sums.inner, n, [=, stride = sums.inner](int64_t i) {
        const T rounded = T(A(sum[i * stride]) + A(to[i * inner]));
        in[i] = A(rounded);
        return rounded;
      });
      const A mean = sum_of<A>(n, [=](int64_t i) { return in[i] * in[i]; }) / A(n);
      const A scale = 1 / std::sqrt(mean + A(eps));
      store(to, inner, n, [=](int64_t i) { return in[i] * scale * w[i]; });
    }
  }
}
