// CUDA's functions of numbers, by those of C. A CPU rounds as IEEE 754 has it; what a GPU approximates is exact here.
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

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned reversed = 0;
  for (int at = 0; at < 32; at++) reversed |= (v >> at & 1) << (31 - at);
  return reversed;
}
inline int __mul24(int a, int b) { return a * b; }
inline int __mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
  return (s &= 31) ? hi << s | lo >> (32 - s) : hi;
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
  return (s &= 31) ? lo >> s | hi << (32 - s) : lo;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t all = uint64_t(y) << 32 | x;
  unsigned found = 0;
  for (int at = 0; at < 4; at++) {
    unsigned byte = all >> ((selector >> 4 * at & 7) * 8) & 255;
    if (selector >> 4 * at & 8) byte = byte & 128 ? 255 : 0;
    found |= byte << 8 * at;
  }
  return found;
}

inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return 1 / std::sqrt(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline float __saturatef(float a) { return a > 0 ? (a < 1 ? a : 1) : 0; }
inline int __float2int_rn(float a) { return int(std::nearbyint(a)); }
inline int __float2int_rz(float a) { return int(a); }
inline int __float2int_rd(float a) { return int(std::floor(a)); }
inline int __float2int_ru(float a) { return int(std::ceil(a)); }
inline unsigned __float2uint_rn(float a) { return unsigned(std::nearbyint(a)); }
inline unsigned __float2uint_rz(float a) { return unsigned(a); }
inline float __int2float_rn(int a) { return float(a); }
inline float __uint2float_rn(unsigned a) { return float(a); }
inline float __double2float_rn(double a) { return float(a); }
inline float rsqrtf(float a) { return 1 / std::sqrt(a); }
inline double rsqrt(double a) { return 1 / std::sqrt(a); }
inline float rsqrt(float a) { return rsqrtf(a); }
inline float rcbrtf(float a) { return 1 / std::cbrt(a); }
inline float normcdff(float a) { return 0.5f * std::erfc(-a * 0.70710678f); }
inline double normcdf(double a) { return 0.5 * std::erfc(-a * 0.70710678118654752); }
inline float sinpif(float a) { return float(std::sin(M_PI * a)); }
inline float cospif(float a) { return float(std::cos(M_PI * a)); }

// glibc declares these names, and defines none of them.
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
  return x < y || x != x ? y : x;  // of nan and a number the number
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
EMULATED_INLINE constexpr std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return y < x || x != x ? y : x;
}
EMULATED_INLINE constexpr float max(float a, float b) { return a < b || a != a ? b : a; }  // also for what becomes a float
EMULATED_INLINE constexpr float min(float a, float b) { return b < a || a != a ? b : a; }
