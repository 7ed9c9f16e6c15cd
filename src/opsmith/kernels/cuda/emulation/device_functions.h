// CUDA's functions of real numbers that C lacks. A float is computed in double precision and rounded once.
#pragma once

inline double rsqrt(double a) { return 1 / std::sqrt(a); }
inline double rcbrt(double a) { return 1 / std::cbrt(a); }
inline double rhypot(double a, double b) { return 1 / std::hypot(a, b); }
inline double norm3d(double a, double b, double c) { return std::hypot(std::hypot(a, b), c); }
inline double norm4d(double a, double b, double c, double d) { return std::hypot(norm3d(a, b, c), d); }
inline double rnorm3d(double a, double b, double c) { return 1 / norm3d(a, b, c); }
inline double rnorm4d(double a, double b, double c, double d) { return 1 / norm4d(a, b, c, d); }
inline double normcdf(double a) { return 0.5 * std::erfc(-a * 0.70710678118654752); }

// The argument is reduced before the product with pi, which rounds: sin(pi n) is 0.
inline double sinpi(double a) {
  const double turn = std::fmod(a, 2.0), half = std::nearbyint(turn * 2), rest = (turn - half / 2) * M_PI;
  const int quarter = int(half) & 3;
  const double found = quarter & 1 ? std::cos(rest) : std::sin(rest);
  return quarter & 2 ? -found : found;
}
inline double cospi(double a) {
  const double turn = std::fmod(std::fabs(a), 2.0), half = std::nearbyint(turn * 2), rest = (turn - half / 2) * M_PI;
  const int quarter = int(half) & 3;
  const double found = quarter & 1 ? -std::sin(rest) : std::cos(rest);
  return quarter & 2 ? -found : found;
}

// The inverse of erfc by Newton's method with Halley's correction, from the bound of its tail.
inline double erfcinv(double a) {
  if (!(a >= 0 && a <= 2)) return NAN;
  if (a == 0 || a == 2) return a == 0 ? INFINITY : -INFINITY;
  const double tail = a < 1 ? a : 2 - a, far = std::sqrt(-2 * std::log(tail / 2));
  double found = -0.70711 * ((2.30753 + far * 0.27061) / (1 + far * (0.99229 + far * 0.04481)) - far);
  for (int round = 0; round < 3; round++) {
    const double off = std::erfc(found) - tail;
    found += off / (1.12837916709551257 * std::exp(-found * found) - found * off);
  }
  return a < 1 ? found : -found;
}
inline double erfinv(double a) {
  if (std::fabs(a) > 0.5 || a != a) return a > 0 ? erfcinv(1 - a) : -erfcinv(1 + a);
  double found = a * 0.88622692545275801;
  for (int round = 0; round < 4; round++) {
    const double off = std::erf(found) - a;
    found -= off / (1.12837916709551257 * std::exp(-found * found) + found * off);
  }
  return found;
}
inline double normcdfinv(double a) { return -1.41421356237309505 * erfcinv(2 * a); }
inline double erfcx(double a) {
  if (a < 20) return std::exp(a * a) * std::erfc(a);
  const double square = 1 / (2 * a * a);  // the asymptotic series
  return 0.56418958354775629 / a * (1 - square * (1 - 3 * square * (1 - 5 * square)));
}
// Modified Bessel functions by their series, whose terms have one sign.
inline double cyl_bessel_i0(double a) {
  double term = 1, sum = 1;
  for (int k = 1; term > sum * 1e-17; k++) term *= a * a / 4 / k / k, sum += term;
  return sum;
}
inline double cyl_bessel_i1(double a) {
  double term = 1, sum = 1;
  for (int k = 1; term > sum * 1e-17; k++) term *= a * a / 4 / k / (k + 1), sum += term;
  return sum * a / 2;
}

#define EMULATED_FLOAT_OF(name) inline float name##f(float a) { return float(name(double(a))); }
#define EMULATED_OVERLOAD(name) EMULATED_FLOAT_OF(name) inline float name(float a) { return name##f(a); }
EMULATED_OVERLOAD(rsqrt)
EMULATED_OVERLOAD(rcbrt)
EMULATED_OVERLOAD(normcdf)
EMULATED_OVERLOAD(normcdfinv)
EMULATED_OVERLOAD(sinpi)
EMULATED_OVERLOAD(cospi)
EMULATED_OVERLOAD(erfinv)
EMULATED_OVERLOAD(erfcinv)
EMULATED_OVERLOAD(erfcx)
EMULATED_FLOAT_OF(cyl_bessel_i0)
EMULATED_FLOAT_OF(cyl_bessel_i1)
inline float rhypotf(float a, float b) { return float(rhypot(a, b)); }
inline float norm3df(float a, float b, float c) { return float(norm3d(a, b, c)); }
inline float norm4df(float a, float b, float c, float d) { return float(norm4d(a, b, c, d)); }
inline float rnorm3df(float a, float b, float c) { return float(rnorm3d(a, b, c)); }
inline float rnorm4df(float a, float b, float c, float d) { return float(rnorm4d(a, b, c, d)); }
inline void sincospi(double a, double* sine, double* cosine) { *sine = sinpi(a), *cosine = cospi(a); }
inline void sincospif(float a, float* sine, float* cosine) { *sine = sinpif(a), *cosine = cospif(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline float __frsqrt_rn(float a) { return rsqrtf(a); }
inline float __saturatef(float a) { return a > 0 ? (a < 1 ? a : 1) : 0; }
inline void __sincosf(float a, float* sine, float* cosine) { *sine = std::sin(a), *cosine = std::cos(a); }
