// Lanes that contain two numbers of bfloat16, for processors that multiply both in one step and add both
// products. Such processors treat numbers below 1.2e-38 as zero, also in PyTorch's matrix products of
// bfloat16. If a number has no partner, both factors of the missing product are zero: zero times inf would be
// nan.
#pragma once
#include "involution.h"

namespace involution {

// Number of items of T in a lane.
template <class T>
constexpr int paired = 1;
#if defined(LANES_PAIRED)
template <>
constexpr int paired<opsmith::BFloat16> = 2;
#endif

using Bits = Vector<lanes::Bits<float>>;  // of lanes with a pair each, the first in the lower half

template <class T>
[[gnu::always_inline]] inline void add_products(Vector<Computed<T>>& sum, Vector<Computed<T>> one,
                                                Vector<Computed<T>> other) {
#if defined(LANES_PAIRED)
  if constexpr (paired<T> == 2) {
    sum = (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)one, (__m512bh)other);
    return;
  }
#endif
  sum += one * other;
}

// As `add_products`, of one lane with all of the other's.
template <class T>
[[gnu::always_inline]] inline void add_products(Vector<Computed<T>>& sum, const Computed<T>& lane,
                                                Vector<Computed<T>> other) {
  if constexpr (paired<T> == 2) {
    lanes::Bits<float> pair;  // as they are: adding a number to zero would change some
    std::memcpy(&pair, &lane, sizeof pair);
    add_products<T>(sum, (Vector<float>)(Bits{} + pair), other);
  } else {
    sum += lane * other;
  }
}

// The first of each pair, with zero for the second.
[[gnu::always_inline]] inline Vector<float> first_alone(Vector<float> pairs) {
  return (Vector<float>)((Bits)pairs & 0xffff);
}

// Makes pairs of numbers that are `stride` apart; where one of the two is null, it is zero. What lies `ahead`
// numbers from them is fetched meanwhile. As `widen`, the last may write beyond the end.
template <class T>
void pair_up(const T* first, const T* second, int64_t stride, int64_t size, float* to, int64_t ahead) {
  constexpr int L = count<float>;
  if (stride != 1) {
    for (int64_t at = 0; at < size; at++) {
      uint16_t pair[2] = {};
      if (first) std::memcpy(pair, first + at * stride, sizeof *pair);
      if (second) std::memcpy(pair + 1, second + at * stride, sizeof *pair);
      const uint32_t bits = uint32_t(pair[1]) << 16 | pair[0];
      std::memcpy(to + at, &bits, sizeof bits);
    }
    return;
  }
  typedef uint32_t Wide __attribute__((vector_size(lanes::bytes)));
  for (int64_t at = 0; at < size; at += L) {
    auto load = [&](const T* from) __attribute__((always_inline)) {
      __builtin_prefetch(from + at + ahead);
      return (Wide)(size - at >= L ? lanes::load(from + at) : lanes::load_some(from + at, size - at));
    };
    Wide pairs{};
    if (first) pairs = load(first) >> 16;
    if (second) pairs |= load(second);
    std::memcpy(to + at, &pairs, sizeof pairs);
  }
}

// Makes weights pairs, those of each even row of taps with those of the row below. As `widen_rows`, with the
// rows of both, `rows_of` those of a row of taps.
template <class T, class RowsOf>
void pair_rows(const T* weights, const opsmith::View<const T, 6>& weight, RowsOf rows_of, int64_t ahead,
               float* to, int64_t pitch) {
  const int64_t size = weight.size(5);
  const bool flat = weight.stride(5) == 1 && weight.stride(4) == size;
  for (int64_t u = 0; u < weight.size(2); u += 2) {
    const bool odd = u + 1 == weight.size(2);
    const auto [above, begin] = rows_of(u);
    const Span below = rows_of(odd ? u : u + 1).first;
    const Span rows{std::min(above.first, below.first), std::max(above.last, below.last)};
    const int64_t at_once = flat ? rows.last - rows.first : 1;
    for (int64_t v = 0; v < weight.size(3); v++) {
      const T* from = weights + u * weight.stride(2) + v * weight.stride(3);
      float* tap = to + (u / 2 * weight.size(3) + v) * pitch;
      for (int64_t row = rows.first; row < rows.last; row += at_once) {
        const T* first = from + row * weight.stride(4);
        pair_up(first, odd ? nullptr : first + weight.stride(2), weight.stride(5), at_once * size,
                tap + (row - begin) * size, ahead);
      }
    }
  }
}

// Makes some rows of pixels pairs, each with the row that lies `apart` below. Rows but these count as zero;
// the `apart` above them are made as well, where there are so many.
inline void pair_rows_of_pixels(const Pixels<float>& pixels, const Span& rows, int64_t apart) {
  typedef uint32_t Wide __attribute__((vector_size(lanes::bytes)));
  const int64_t size = pixels.pitch * count<float>;
  for (int64_t row = std::max<int64_t>(0, rows.first - apart); row < rows.last; row++) {
    const bool is_first = row >= rows.first, is_second = row + apart >= rows.first && row + apart < rows.last;
    float* to = pixels.at(row, 0);
    for (int64_t at = 0; at < size; at += count<float>) {
      Wide first{}, second{};
      if (is_first) std::memcpy(&first, to + at, sizeof first);
      if (is_second) std::memcpy(&second, pixels.at(row + apart, 0) + at, sizeof second);
      second |= first >> 16;
      std::memcpy(to + at, &second, sizeof second);
    }
  }
}

}  // namespace involution
