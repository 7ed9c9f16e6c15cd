// CUDA's functions that name how they round: _rn to the nearest, _rz to zero, _ru up, _rd down.
#pragma once
#include <fenv.h>
#include <limits>

namespace emulated {

// Computes in a different rounding mode. Volatile numbers keep the operation between the two changes of the mode.
template <class R, class T, class F> EMULATED_UNCHECKED R rounded(int mode, T a, T b, T c, F f) {
  volatile T x = a, y = b, z = c;
  fesetround(mode);
  volatile R result = f(x, y, z);
  fesetround(FE_TONEAREST);
  return result;
}

// Converts a floating-point number without a fraction to a whole number, as a GPU does. Outside of the range, it is
// the nearest whole number. For nan (PTX manual, cvt) it is 0 from 32 to 32 bits, and otherwise only the highest bit.
template <class To, class From> EMULATED_INLINE To saturated(From from) {
  using Limits = std::numeric_limits<To>;
  if (from != from) return sizeof(From) == 4 && sizeof(To) == 4 ? To(0) : To(1ull << (8 * sizeof(To) - 1));
  if (from <= From(Limits::min())) return Limits::min();
  if (from >= From(Limits::max())) return Limits::max();
  return To(from);
}

}  // namespace emulated

#define EMULATED_ROUNDED(name, R, T, parameters, b, c, result)                                        \
  inline R name##_rn parameters { const T x = a, y = b, z = c; (void)y, (void)z; return R(result); }  \
  EMULATED_ROUNDED_BY(name##_rz, R, T, parameters, b, c, result, FE_TOWARDZERO)                       \
  EMULATED_ROUNDED_BY(name##_ru, R, T, parameters, b, c, result, FE_UPWARD)                           \
  EMULATED_ROUNDED_BY(name##_rd, R, T, parameters, b, c, result, FE_DOWNWARD)
#define EMULATED_ROUNDED_BY(name, R, T, parameters, b, c, result, mode)                               \
  inline R name parameters {                                                                          \
    return emulated::rounded<R, T>(mode, a, b, c, [](T x, T y, T z) { (void)y, (void)z; return R(result); }); \
  }
#define EMULATED_ARITHMETIC(f, T)                                                                     \
  EMULATED_ROUNDED(__##f##add, T, T, (T a, T b), b, b, x + y)                                         \
  EMULATED_ROUNDED(__##f##sub, T, T, (T a, T b), b, b, x - y)                                         \
  EMULATED_ROUNDED(__##f##mul, T, T, (T a, T b), b, b, x * y)                                         \
  EMULATED_ROUNDED(__##f##div, T, T, (T a, T b), b, b, x / y)                                         \
  EMULATED_ROUNDED(__##f##rcp, T, T, (T a), a, a, 1 / x)                                              \
  EMULATED_ROUNDED(__##f##sqrt, T, T, (T a), a, a, std::sqrt(x))
EMULATED_ARITHMETIC(f, float)
EMULATED_ARITHMETIC(d, double)
EMULATED_ROUNDED(__fmaf, float, float, (float a, float b, float c), b, c, std::fma(x, y, z))
EMULATED_ROUNDED(__fma, double, double, (double a, double b, double c), b, c, std::fma(x, y, z))
EMULATED_ROUNDED(__double2float, float, double, (double a), a, a, x)

#define EMULATED_FROM_WHOLE(name, T)                                                                  \
  EMULATED_ROUNDED(__##name##2float, float, T, (T a), a, a, x)                                        \
  EMULATED_ROUNDED(__##name##2double, double, T, (T a), a, a, x)
EMULATED_FROM_WHOLE(int, int)
EMULATED_FROM_WHOLE(uint, unsigned)
EMULATED_FROM_WHOLE(ll, long long)
EMULATED_FROM_WHOLE(ull, unsigned long long)

#define EMULATED_TO_WHOLE(from, F, to, T)                                                             \
  inline T __##from##2##to##_rn(F a) { return emulated::saturated<T>(std::nearbyint(a)); }            \
  inline T __##from##2##to##_rz(F a) { return emulated::saturated<T>(std::trunc(a)); }                \
  inline T __##from##2##to##_ru(F a) { return emulated::saturated<T>(std::ceil(a)); }                 \
  inline T __##from##2##to##_rd(F a) { return emulated::saturated<T>(std::floor(a)); }
#define EMULATED_TO_EACH_WHOLE(from, F)                                                               \
  EMULATED_TO_WHOLE(from, F, int, int)                                                                \
  EMULATED_TO_WHOLE(from, F, uint, unsigned)                                                          \
  EMULATED_TO_WHOLE(from, F, ll, long long)                                                           \
  EMULATED_TO_WHOLE(from, F, ull, unsigned long long)
EMULATED_TO_EACH_WHOLE(float, float)
EMULATED_TO_EACH_WHOLE(double, double)

inline int __double2hiint(double a) { return int(emulated::bits<uint64_t>(a) >> 32); }
inline int __double2loint(double a) { return int(emulated::bits<uint64_t>(a)); }
inline double __hiloint2double(int hi, int lo) {
  return emulated::bits<double>(uint64_t(unsigned(hi)) << 32 | unsigned(lo));
}
