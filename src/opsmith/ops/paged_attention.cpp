#include "rows.h"

// Σ a[i] b[i * stride] over 0 <= i < n.
template <class T>
Wide<T> product(const Wide<T>* a, const T* b, int64_t stride, int64_t n) {
  using A = Wide<T>;
  A sum = 0;
  if (stride == 1) {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * A(b[i]);
  } else {
    for (int64_t i = 0; i < n; i++) sum += a[i] * A(b[i * stride]);
  }
  return sum;
}

// sum[i] += factor a[i * stride] for 0 <= i < n.
template <class T>
void add_scaled(Wide<T>* sum, Wide<T> factor, const T* a, int64_t stride, int64_t n) {
  using A = Wide<T>;
  if (stride == 1) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) sum[i] += factor * A(a[i]);
  } else {
    for (int64_t i = 0; i < n; i++) sum[i] += factor * A(a[i * stride]);
  }
}

// The row of a cache that the token at a position of a sequence has, for one head.
template <class T>
const T* row_of(const View<const T, 4>& cache, const int64_t* blocks, int64_t step, int64_t position, int64_t head) {
  const int64_t size = cache.size(1);
  return cache.data + blocks[position / size * step] * cache.stride(0) + position % size * cache.stride(1) +
         head * cache.stride(2);
}

template <class T>
void paged_attention(View<const T, 3> query, View<const T, 4> key_cache, View<const T, 4> value_cache,
                     View<const int64_t, 2> block_table, View<const int64_t, 1> lengths, std::optional<double> scale,
                     View<T, 3> result) {
  using A = Wide<T>;
  const int64_t count = query.size(0), heads = query.size(1), dim = query.size(2), width = value_cache.size(3);
  const int64_t size = key_cache.size(1), groups = key_cache.size(2);
  OPSMITH_CHECK(groups > 0 && heads % groups == 0,
                "the query has %lld heads, which is not a multiple of the cache's %lld heads", (long long)heads,
                (long long)groups);
  int64_t tokens = 0, longest = 0;
  for (int64_t n = 0; n < count; n++) {
    const int64_t length = lengths(n);
    OPSMITH_CHECK(length >= 0 && length <= block_table.size(1) * size,
                  "sequence %lld has %lld tokens, but its blocks hold %lld tokens", (long long)n, (long long)length,
                  (long long)(block_table.size(1) * size));
    for (int64_t at = 0; at * size < length; at++)
      OPSMITH_CHECK(block_table(n, at) >= 0 && block_table(n, at) < key_cache.size(0),
                    "block %lld of sequence %lld is beyond the cache, which has %lld blocks",
                    (long long)block_table(n, at), (long long)n, (long long)key_cache.size(0));
    tokens += length;
    longest = std::max(longest, length);
  }
  const A factor = scale ? A(*scale) : 1 / std::sqrt(A(dim));
#pragma omp parallel if (tokens * heads * (dim + width) > WORTH_THREADS)
  {
    std::vector<A> asked(static_cast<size_t>(dim)), weights(static_cast<size_t>(longest)),
        sum(static_cast<size_t>(width));
#pragma omp for
    for (int64_t at = 0; at < count * heads; at++) {
      const int64_t n = at / heads, head = at % heads, group = head / (heads / groups), length = lengths(n);
      const int64_t* blocks = block_table.data + n * block_table.stride(0);
      const int64_t step = block_table.stride(1);
      for (int64_t i = 0; i < dim; i++) asked[size_t(i)] = A(query(n, head, i)) * factor;
      A largest = -std::numeric_limits<A>::infinity(), total = 0;
      for (int64_t p = 0; p < length; p++) {
        const T* key = row_of(key_cache, blocks, step, p, group);
        weights[size_t(p)] = product(asked.data(), key, key_cache.stride(3), dim);
        largest = std::max(largest, weights[size_t(p)]);
      }
      std::fill(sum.begin(), sum.end(), A(0));
      for (int64_t p = 0; p < length; p++) {
        const A weight = std::exp(weights[size_t(p)] - largest);
        total += weight;
        const T* value = row_of(value_cache, blocks, step, p, group);
        add_scaled(sum.data(), weight, value, value_cache.stride(3), width);
      }
      const A share = length > 0 ? 1 / total : A(0);
      for (int64_t i = 0; i < width; i++) result(n, head, i) = T(sum[size_t(i)] * share);
    }
  }
}
