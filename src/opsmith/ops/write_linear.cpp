#include "rows.h"

// Each row of the weight is read once, and multiplied with all rows of x. There are few rows of x.
template <class T>
void write_linear(View<T, 2> y, View<const T, 2> x, View<const T, 2> weight) {
  using A = Wide<T>;
  constexpr int64_t TOGETHER = 4;  // rows of x for which a row of the weight is read once
  const int64_t rows = x.size(0), inputs = x.size(1), outputs = weight.size(0);
  std::vector<A> wide;
  const A* from = nullptr;
  int64_t step = x.stride(0);
  if constexpr (std::is_same_v<T, A>)
    if (x.stride(1) == 1) from = x.data;
  if (from == nullptr) {
    wide.resize(size_t(rows * inputs));
    for (int64_t n = 0; n < rows; n++)
      for (int64_t i = 0; i < inputs; i++) wide[size_t(n * inputs + i)] = A(x(n, i));
    from = wide.data();
    step = inputs;
  }
#pragma omp parallel if (rows * inputs * outputs > 16 * WORTH_THREADS)
  {
    std::vector<A> buffer(static_cast<size_t>(inputs));
#pragma omp for
    for (int64_t m = 0; m < outputs; m++) {
      const A* w = widened(weight.data + m * weight.stride(0), weight.stride(1), inputs, buffer.data());
      int64_t n = 0;
      for (; n + TOGETHER <= rows; n += TOGETHER) {
        const A *a = from + n * step, *b = a + step, *c = b + step, *d = c + step;
        A sum_a = 0, sum_b = 0, sum_c = 0, sum_d = 0;
#pragma omp simd reduction(+ : sum_a, sum_b, sum_c, sum_d)
        for (int64_t i = 0; i < inputs; i++) {
          sum_a += a[i] * w[i];
          sum_b += b[i] * w[i];
          sum_c += c[i] * w[i];
          sum_d += d[i] * w[i];
        }
        y(n, m) = T(sum_a);
        y(n + 1, m) = T(sum_b);
        y(n + 2, m) = T(sum_c);
        y(n + 3, m) = T(sum_d);
      }
      for (; n < rows; n++) {
        const A* a = from + n * step;
        y(n, m) = T(sum_of<A>(inputs, [=](int64_t i) { return a[i] * w[i]; }));
      }
    }
  }
}
