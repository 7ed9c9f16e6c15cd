// Turns pairs of numbers: a block for each token, whose threads lie across the pairs of a head and the heads.
#include "rows.cuh"

template <class T>
__global__ void rope_(View<T> x, View<const Wide<T>, 2> cos_sin, View<const int64_t> positions, bool interleaved) {
  using A = Wide<T>;
  const int64_t token = blockIdx.x, heads = x.size(-2), half = cos_sin.size(1) / 2;
  const int64_t position = element(positions, token);
  assert(position >= 0 && position < cos_sin.size(0));
  const Rows<T> rows(x);
  for (int64_t head = threadIdx.y; head < heads; head += blockDim.y) {
    const Row<T> row = rows(token * heads + head);
    for (int64_t i = threadIdx.x; i < half; i += blockDim.x) {
      T& first = row[interleaved ? 2 * i : i];
      T& second = row[interleaved ? 2 * i + 1 : i + half];
      const A a = A(first), b = A(second), cos = cos_sin(position, i), sin = cos_sin(position, i + half);
      first = T(a * cos - b * sin);
      second = T(b * cos + a * sin);
    }
  }
}
