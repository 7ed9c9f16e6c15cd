// Functions of half precision that NVIDIA's headers have only for GPUs, computed in float and rounded once.
#pragma once

#define EMULATED_OF_ONE(name, S, P, to, from, pair, f)                                                \
  inline S h##name(S a) { const float x = to(a); return from(f); }                                    \
  inline P h2##name(P a) { return pair(h##name(a.x), h##name(a.y)); }
#define EMULATED_INTEGER(S, word, to, name, T)                                                        \
  inline T __##word##2##name##_rn(S a) { return static_cast<T>(std::nearbyint(to(a))); }              \
  inline T __##word##2##name##_rd(S a) { return static_cast<T>(std::floor(to(a))); }                  \
  inline T __##word##2##name##_ru(S a) { return static_cast<T>(std::ceil(to(a))); }
#define EMULATED_HALVES(S, P, word, to, from, pair)                                                   \
  EMULATED_OF_ONE(ceil, S, P, to, from, pair, std::ceil(x))                                           \
  EMULATED_OF_ONE(floor, S, P, to, from, pair, std::floor(x))                                         \
  EMULATED_OF_ONE(trunc, S, P, to, from, pair, std::trunc(x))                                         \
  EMULATED_OF_ONE(rint, S, P, to, from, pair, std::nearbyint(x))                                      \
  EMULATED_OF_ONE(cos, S, P, to, from, pair, std::cos(x))                                             \
  EMULATED_OF_ONE(sin, S, P, to, from, pair, std::sin(x))                                             \
  EMULATED_OF_ONE(tanh, S, P, to, from, pair, std::tanh(x))                                           \
  EMULATED_OF_ONE(tanh_approx, S, P, to, from, pair, std::tanh(x))                                    \
  EMULATED_OF_ONE(exp, S, P, to, from, pair, std::exp(x))                                             \
  EMULATED_OF_ONE(exp2, S, P, to, from, pair, std::exp2(x))                                           \
  EMULATED_OF_ONE(exp10, S, P, to, from, pair, std::pow(10.0f, x))                                    \
  EMULATED_OF_ONE(log, S, P, to, from, pair, std::log(x))                                             \
  EMULATED_OF_ONE(log2, S, P, to, from, pair, std::log2(x))                                           \
  EMULATED_OF_ONE(log10, S, P, to, from, pair, std::log10(x))                                         \
  EMULATED_OF_ONE(rcp, S, P, to, from, pair, 1 / x)                                                   \
  EMULATED_OF_ONE(sqrt, S, P, to, from, pair, std::sqrt(x))                                           \
  EMULATED_OF_ONE(rsqrt, S, P, to, from, pair, 1 / std::sqrt(x))                                      \
  EMULATED_INTEGER(S, word, to, int, int)                                                             \
  EMULATED_INTEGER(S, word, to, uint, unsigned)                                                       \
  EMULATED_INTEGER(S, word, to, short, short)                                                         \
  EMULATED_INTEGER(S, word, to, ushort, unsigned short)                                               \
  EMULATED_INTEGER(S, word, to, ll, long long)                                                        \
  EMULATED_INTEGER(S, word, to, ull, unsigned long long)                                              \
  inline S __hfma(S a, S b, S c) { return from(std::fma(to(a), to(b), to(c))); }                      \
  inline S __hfma_sat(S a, S b, S c) { return from(__saturatef(std::fma(to(a), to(b), to(c)))); }     \
  inline S __hfma_relu(S a, S b, S c) { return from(max(std::fma(to(a), to(b), to(c)), 0.0f)); }      \
  inline P __hfma2(P a, P b, P c) { return pair(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }      \
  inline P __hfma2_sat(P a, P b, P c) {                                                               \
    return pair(__hfma_sat(a.x, b.x, c.x), __hfma_sat(a.y, b.y, c.y));                                \
  }                                                                                                   \
  inline P __hfma2_relu(P a, P b, P c) {                                                              \
    return pair(__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y));                              \
  }                                                                                                   \
  inline P __hcmadd(P a, P b, P c) {                                                                  \
    const float x = to(a.x) * to(b.x) - to(a.y) * to(b.y), y = to(a.x) * to(b.y) + to(a.y) * to(b.x); \
    return pair(from(x + to(c.x)), from(y + to(c.y)));                                                \
  }                                                                                                   \
  EMULATED_ATOMIC_SUM(S, from(to(old) + to(value)))                                                   \
  EMULATED_ATOMIC_SUM(P, pair(from(to(old.x) + to(value.x)), from(to(old.y) + to(value.y))))          \
  EMULATED_SHUFFLES(S)                                                                                \
  EMULATED_SHUFFLES(P)
