#include "rows.h"

template <class T>
void swiglu_(View<T> gate, View<const T> up) {
  using A = Wide<T>;
  const int64_t n = gate.size(-1), count = n ? gate.numel() / n : 0;
  const Rows<T> gates(gate);
  const Rows<const T> ups(up);
#pragma omp parallel for if (count * n > WORTH_THREADS)
  for (int64_t row = 0; row < count; row++) {
    T* to = gates(row);
    const T* from = ups(row);
    for (int64_t i = 0; i < n; i++) {
      const A x = A(to[i * gates.inner]);
      to[i * gates.inner] = T(x / (1 + std::exp(-x)) * A(from[i * ups.inner]));
    }
  }
}
