// Vectors with the number of lanes of this processor, and their operations: loads that widen, stores that
// round, parts of a vector at the ends of rows, and the transposition of a square of lanes.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lanes {

#if defined(__AVX512F__) || !defined(__x86_64__)
constexpr int registers = 32;  // of vectors
#else
constexpr int registers = 16;
#endif
#if defined(__AVX512F__)
constexpr int bytes = 64;
#elif defined(__AVX__)
constexpr int bytes = 32;
#else
constexpr int bytes = 16;
#endif

template <class T>
struct computed {
  using type = float;
};  // 16-bit numbers are computed in float
template <>
struct computed<double> {
  using type = double;
};
template <class T>
using Computed = typename computed<T>::type;

template <class A>
constexpr int count = bytes / int(sizeof(A));
template <class A>
using Vector __attribute__((vector_size(bytes))) = A;

// Calls `body` with the numbers below N, each a constant: loops that the compiler has to unroll, so that an
// array of vectors becomes registers.
template <int V>
using Constant = std::integral_constant<int, V>;
template <class Body, int... I>
[[gnu::always_inline]] inline void each_of(Body&& body, std::integer_sequence<int, I...>) {
  (body(Constant<I>{}), ...);
}
template <int N, class Body>
[[gnu::always_inline]] inline void each(Body&& body) {
  each_of(static_cast<Body&&>(body), std::make_integer_sequence<int, N>{});
}

// Makes the compiler keep an address: if it derives several addresses from each other, it needs many
// registers.
template <class T>
[[gnu::always_inline]] inline void keep(T*& address) {
  asm("" : "+r"(address));
}

// Makes the compiler load a vector once instead of once for each operation: a vector across two cache lines
// takes two loads each time.
template <class V>
[[gnu::always_inline]] inline void loaded(V& vector) {
#if defined(__x86_64__)
  asm("" : "+v"(vector));
#endif
}

template <class A>
[[gnu::always_inline]] inline Vector<A> all(A value) {
  return Vector<A>{} + value;
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define LANES_MASKED 1  // parts of a vector of any elements are loaded and stored in one step
#endif
#if defined(LANES_MASKED) && defined(__AVX512BF16__)
#define LANES_PAIRED 1  // bfloat16 is rounded to, and multiplied two by two, in one step
#endif

// As many elements as there are lanes, in memory of any alignment, unconverted.
template <class T>
struct held {
  typedef uint16_t type __attribute__((vector_size(bytes / 2)));
};
template <>
struct held<float> {
  using type = Vector<float>;
};
template <>
struct held<double> {
  using type = Vector<double>;
};
template <class T>
using Held = typename held<T>::type;

template <class T>
[[gnu::always_inline]] inline Vector<Computed<T>> widened(Held<T> elements) {
  using A = Computed<T>;
  if constexpr (std::is_same_v<T, A>) {
    return elements;
  } else if constexpr (std::is_same_v<T, opsmith::BFloat16>) {
    typedef uint32_t Wide __attribute__((vector_size(bytes)));
    return (Vector<A>)(__builtin_convertvector(elements, Wide) << 16);
  } else {
#if defined(__AVX512F__)
    return (Vector<A>)_mm512_cvtph_ps((__m256i)elements);
#elif defined(__F16C__) && defined(__AVX__)
    return (Vector<A>)_mm256_cvtph_ps((__m128i)elements);
#else
    T each[count<A>];
    std::memcpy(each, &elements, sizeof each);
    Vector<A> result;
    for (int at = 0; at < count<A>; at++) result[at] = float(each[at]);
    return result;
#endif
  }
}

template <class T>
[[gnu::always_inline]] inline Held<T> narrowed(Vector<Computed<T>> value) {
  using A = Computed<T>;
  if constexpr (std::is_same_v<T, A>) {
    return value;
  } else if constexpr (std::is_same_v<T, opsmith::Half>) {
#if defined(__AVX512F__)
    return (Held<T>)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__) && defined(__AVX__)
    return (Held<T>)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
    T each[count<A>];
    for (int at = 0; at < count<A>; at++) each[at] = T(value[at]);
    Held<T> result;
    std::memcpy(&result, each, sizeof each);
    return result;
#endif
  } else {
#if defined(LANES_PAIRED)
    return (Held<T>)_mm512_cvtneps_pbh((__m512)value);
#else
    typedef uint32_t Wide __attribute__((vector_size(bytes)));
    Wide wide = (Wide)value, kept = wide >> 16;
    Wide rounded = (wide + 0x7fffu + (kept & 1)) >> 16;
    Wide is_nan = (Wide)((wide & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector((is_nan & (kept | 0x40)) | (~is_nan & rounded), Held<T>);
#endif
  }
}

template <class T>
[[gnu::always_inline]] inline Vector<Computed<T>> load(const T* from) {
  Held<T> elements;
  std::memcpy(&elements, from, sizeof elements);
  return widened<T>(elements);
}

template <class T>
[[gnu::always_inline]] inline void store(T* to, Vector<Computed<T>> value) {
  const Held<T> elements = narrowed<T>(value);
  std::memcpy(to, &elements, sizeof elements);
}

#if defined(__AVX__) && !defined(__AVX512F__)
// Masks of 32 bits, from which a load at `8 - some` takes one whose first `some` lanes are set.
alignas(64) inline constexpr int32_t MASKS[16] = {-1, -1, -1, -1, -1, -1, -1, -1};

template <class A>
[[gnu::always_inline]] inline __m256i first_lanes(int64_t some) {
  constexpr int64_t words = sizeof(A) / 4;
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(MASKS + 8 - some * words));
}
#endif

// Only the first `some` elements; the remaining lanes are 0.
template <class T>
[[gnu::always_inline]] inline Vector<Computed<T>> load_some(const T* from, int64_t some) {
#if defined(__AVX__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    return (Vector<float>)_mm256_maskload_ps(from, first_lanes<float>(some));
  if constexpr (std::is_same_v<T, double>)
    return (Vector<double>)_mm256_maskload_pd(from, first_lanes<double>(some));
#endif
#if defined(LANES_MASKED)
  const uint32_t mask = (1u << some) - 1;
  if constexpr (std::is_same_v<T, float>) return (Vector<float>)_mm512_maskz_loadu_ps(__mmask16(mask), from);
  else if constexpr (std::is_same_v<T, double>)
    return (Vector<double>)_mm512_maskz_loadu_pd(__mmask8(mask), from);
  else return widened<T>((Held<T>)_mm256_maskz_loadu_epi16(__mmask16(mask), from));
#else
  T copy[count<Computed<T>>] = {};
  for (int64_t at = 0; at < some; at++) copy[at] = from[at];
  return load(copy);
#endif
}

// Some of the lanes of a vector, one bit for each.
using Mask = uint16_t;
constexpr Mask first(int64_t some) { return Mask((1u << some) - 1); }

// Makes the compiler keep a mask in a register.
[[gnu::always_inline]] inline void keep([[maybe_unused]] Mask& mask) {
#if defined(LANES_MASKED)
  asm("" : "+k"(mask));
#endif
}

// The elements in some lanes, if the processor is `masked`: the other lanes are 0, and their memory is not
// read.
template <class A>
Vector<A> load_lanes(const A* from, Mask lanes);
#if defined(LANES_MASKED)
constexpr bool masked = true;
template <class A>
[[gnu::always_inline]] inline Vector<A> load_lanes(const A* from, Mask lanes) {
  if constexpr (std::is_same_v<A, float>) return (Vector<A>)_mm512_maskz_loadu_ps(lanes, from);
  else return (Vector<A>)_mm512_maskz_loadu_pd(lanes, from);
}
#else
constexpr bool masked = false;
#endif

template <class T>
[[gnu::always_inline]] inline void store_some(T* to, Vector<Computed<T>> value, int64_t some) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {  // a masked store takes many steps on some processors
    if (some < 1 || some >= 8) return some < 1 ? void() : store(to, value);
    // Of two halves, quarters or numbers that may overlap, the last ends with the last element.
    auto last = [&](int64_t many) __attribute__((always_inline)) {
      const __m256i from = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                            _mm256_set1_epi32(int32_t(some - many)));
      return _mm256_castps256_ps128(_mm256_permutevar8x32_ps((__m256)value, from));
    };
    const __m128 first = _mm256_castps256_ps128((__m256)value);
    if (some >= 4) {
      _mm_storeu_ps(to, first), _mm_storeu_ps(to + some - 4, last(4));
    } else if (some >= 2) {
      _mm_storel_pi(reinterpret_cast<__m64*>(to), first);
      _mm_storel_pi(reinterpret_cast<__m64*>(to + some - 2), last(2));
    } else {
      _mm_store_ss(to, first);
    }
    return;
  }
#endif
#if defined(LANES_MASKED)
  const uint32_t mask = (1u << some) - 1;
  if constexpr (std::is_same_v<T, float>) _mm512_mask_storeu_ps(to, __mmask16(mask), (__m512)value);
  else if constexpr (std::is_same_v<T, double>) _mm512_mask_storeu_pd(to, __mmask8(mask), (__m512d)value);
  else _mm256_mask_storeu_epi16(to, __mmask16(mask), (__m256i)narrowed<T>(value));
#else
  T copy[count<Computed<T>>];
  store(copy, value);
  for (int64_t at = 0; at < some; at++) to[at] = copy[at];
#endif
}

// Like `store`, but a whole cache line of 64 bytes bypasses the caches, so that its old content is not read.
// Call `settle` after the last one.
template <class T>
[[gnu::always_inline]] inline void stream_one(T* to, Vector<Computed<T>> value) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Held<T>) == 64)
    if (reinterpret_cast<uintptr_t>(to) % 64 == 0)
      return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#endif
  store(to, value);
}

// Copies to memory without reading its old content: lines of 64 bytes bypass the caches. Without such stores
// it is a plain copy. Call `settle` after the last one.
template <class T>
inline void stream(const T* from, T* to, int64_t size) {
#if defined(__SSE2__)
  constexpr int64_t line = 64 / sizeof(T);
  const int64_t before = std::min<int64_t>(size, -reinterpret_cast<uintptr_t>(to) % 64 / sizeof(T));
  std::memcpy(to, from, before * sizeof(T));
  int64_t at = before;
  for (; at + line <= size; at += line) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
#else
    const __m128i* source = reinterpret_cast<const __m128i*>(from + at);
    __m128i* target = reinterpret_cast<__m128i*>(to + at);
    for (int part = 0; part < 4; part++) _mm_stream_si128(target + part, _mm_loadu_si128(source + part));
#endif
  }
  std::memcpy(to + at, from + at, (size - at) * sizeof(T));
#else
  std::memcpy(to, from, size * sizeof(T));
#endif
}

inline void settle() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// The larger absolute value of two numbers, lane by lane, as integers, which have the same order: inf and
// then nan are the largest.
template <class A>
using Bits = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
template <class A>
[[gnu::always_inline]] inline Vector<Bits<A>> larger(Vector<Bits<A>> least, Vector<A> value) {
  const Vector<Bits<A>> size = (Vector<Bits<A>>)value & std::numeric_limits<Bits<A>>::max();
  return size > least ? size : least;
}

// True where it is inf or nan.
template <class A>
[[gnu::always_inline]] inline Vector<Bits<A>> infinite(Vector<Bits<A>> size) {
  return size >= (Vector<Bits<A>>)all(std::numeric_limits<A>::infinity());
}

// Lanes of one vector and of the other in turn, from lane FIRST of both on.
template <class A, int FIRST, int... I>
[[gnu::always_inline]] inline Vector<A> in_turn(Vector<A> one, Vector<A> other,
                                                std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(one, other, FIRST + I / 2 + I % 2 * count<A>...);
#else
  return __builtin_shuffle(one, other, Vector<Bits<A>>{FIRST + I / 2 + I % 2 * count<A>...});
#endif
}

#if defined(__AVX__) && !defined(__AVX512F__)
// As `transpose`: in both halves of 128 bits at once, and then the halves.
[[gnu::always_inline]] inline void transpose_halves(Vector<float> (&square)[8]) {
  __m256 pairs[8], fours[8];
  each<4>([&](auto i) __attribute__((always_inline)) {
    pairs[2 * i] = _mm256_unpacklo_ps((__m256)square[2 * i], (__m256)square[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_ps((__m256)square[2 * i], (__m256)square[2 * i + 1]);
  });
  each<4>([&](auto i) __attribute__((always_inline)) {
    constexpr int from = i / 2 * 4 + i % 2, to = i / 2 * 4 + i % 2 * 2;
    fours[to] = _mm256_shuffle_ps(pairs[from], pairs[from + 2], 0x44);
    fours[to + 1] = _mm256_shuffle_ps(pairs[from], pairs[from + 2], 0xee);
  });
  each<4>([&](auto i) __attribute__((always_inline)) {
    square[i] = (Vector<float>)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    square[i + 4] = (Vector<float>)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  });
}
#endif

// Transposes a square: afterwards lane i of vector j is what lane j of vector i was.
template <class A>
[[gnu::always_inline]] inline void transpose(Vector<A> (&square)[count<A>]) {
#if defined(__AVX__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) return transpose_halves(square);
#endif
  constexpr int L = count<A>;
  constexpr std::make_integer_sequence<int, L> lanes{};
  each<L == 16  ? 4
       : L == 8 ? 3
       : L == 4 ? 2
                : 1>([&](auto) __attribute__((always_inline)) {
    Vector<A> next[L];  // a perfect shuffle of the rows, log2(L) times, transposes
    each<L / 2>([&](auto i) __attribute__((always_inline)) {
      next[2 * i] = in_turn<A, 0>(square[i], square[i + L / 2], lanes);
      next[2 * i + 1] = in_turn<A, L / 2>(square[i], square[i + L / 2], lanes);
    });
    each<L>([&](auto i) __attribute__((always_inline)) { square[i] = next[i]; });
  });
}

}  // namespace lanes
