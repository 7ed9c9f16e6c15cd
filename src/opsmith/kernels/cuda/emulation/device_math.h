// CUDA's functions of numbers, computed by C's functions. A CPU rounds as in IEEE 754, so GPU approximations are exact.
#pragma once

namespace emulated {

template <class To, class From> EMULATED_INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "numbers of the same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace emulated

// Half precision: to the nearest, ties to even, as `cvt.rn.f16.f32`.
inline float emulated_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 31) return emulated::bits<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return emulated::bits<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = float(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}
inline uint16_t emulated_half(float value) {
  const uint32_t wide = emulated::bits<uint32_t>(value), sign = wide >> 16 & 0x8000, magnitude = wide & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // 65520 and more
  if (magnitude < 0x38800000u) {                                  // subnormal: the sum rounds to multiples of 2^-24
    const float sum = emulated::bits<float>(magnitude) + 0.5f;
    return uint16_t(sign | (emulated::bits<uint32_t>(sum) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

inline float __uint_as_float(unsigned v) { return emulated::bits<float>(v); }
inline unsigned __float_as_uint(float v) { return emulated::bits<unsigned>(v); }
inline float __int_as_float(int v) { return emulated::bits<float>(v); }
inline int __float_as_int(float v) { return emulated::bits<int>(v); }
inline double __longlong_as_double(long long v) { return emulated::bits<double>(v); }
inline long long __double_as_longlong(double v) { return emulated::bits<long long>(v); }

#include "device_integers.h"
#include "device_rounding.h"
#include "device_functions.h"

// glibc declares these names, but does not define them.
extern "C" inline float __expf(float a) { return std::exp(a); }
extern "C" inline float __exp10f(float a) { return std::pow(10.0f, a); }
extern "C" inline float __logf(float a) { return std::log(a); }
extern "C" inline float __log2f(float a) { return std::log2(a); }
extern "C" inline float __log10f(float a) { return std::log10(a); }
extern "C" inline float __sinf(float a) { return std::sin(a); }
extern "C" inline float __cosf(float a) { return std::cos(a); }
extern "C" inline float __tanf(float a) { return std::tan(a); }
extern "C" inline float __powf(float a, float b) { return std::pow(a, b); }

using std::abs, std::isfinite, std::isinf, std::isnan, std::signbit;
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
EMULATED_INLINE constexpr std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return x < y || x != x ? y : x;  // the number, if the other one is nan
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
EMULATED_INLINE constexpr std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return y < x || x != x ? y : x;
}
EMULATED_INLINE constexpr float max(float a, float b) { return a < b || a != a ? b : a; }  // also for what becomes a float
EMULATED_INLINE constexpr float min(float a, float b) { return b < a || a != a ? b : a; }
