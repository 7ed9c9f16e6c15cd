#include "rows.h"

// Rotates n pairs: the first numbers are at a, the second numbers at b, with `step` elements from pair to
// pair.
template <class T>
void turn(T* a, T* b, int64_t step, int64_t n, const Wide<T>* cos, const Wide<T>* sin) {
  using A = Wide<T>;
  auto pair = [=](int64_t i, int64_t at) {
    const A first = A(a[at]), second = A(b[at]);
    a[at] = T(first * cos[i] - second * sin[i]);
    b[at] = T(second * cos[i] + first * sin[i]);
  };
  if (step == 1) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) pair(i, i);
  } else {
    for (int64_t i = 0; i < n; i++) pair(i, i * step);
  }
}

template <class T>
void rope_(View<T> x, View<const Wide<T>, 2> cos_sin, Contiguous<const int64_t> positions, bool interleaved) {
  using A = Wide<T>;
  const int64_t heads = x.size(-2), dim = x.size(-1), tokens = positions.numel();
  const int64_t turned = cos_sin.size(1), half = turned / 2;
  OPSMITH_CHECK(turned % 2 == 0 && turned <= dim,
                "cos_sin has %lld columns: an even number is needed, of at most %lld", (long long)turned,
                (long long)dim);
  if (tokens == 0 || heads == 0 || half == 0) return;
  const Rows<T> rows(x);
  std::vector<const A*> angles(static_cast<size_t>(tokens));
  for (int64_t token = 0; token < tokens; token++) {
    const int64_t at = positions[token];
    OPSMITH_CHECK(at >= 0 && at < cos_sin.size(0),
                  "position %lld of token %lld is beyond the table, which has %lld positions",
                  (long long)at, (long long)token, (long long)cos_sin.size(0));
    angles[size_t(token)] = cos_sin.data + at * cos_sin.stride(0);
  }
#pragma omp parallel if (tokens * heads * turned > WORTH_THREADS)
  {
    std::vector<A> buffer(static_cast<size_t>(turned));
#pragma omp for
    for (int64_t token = 0; token < tokens; token++) {
      const A* cos = widened(angles[size_t(token)], cos_sin.stride(1), turned, buffer.data());
      for (int64_t head = 0; head < heads; head++) {
        T* row = rows(token * heads + head);
        if (interleaved)
          turn(row, row + rows.inner, 2 * rows.inner, half, cos, cos + half);
        else
          turn(row, row + half * rows.inner, rows.inner, half, cos, cos + half);
      }
    }
  }
}
