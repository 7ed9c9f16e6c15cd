// CUDA's functions of whole numbers.
#pragma once

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
inline unsigned long long __brevll(unsigned long long v) {
  return (unsigned long long)__brev(unsigned(v)) << 32 | __brev(unsigned(v >> 32));
}
inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned s) {
  return s < 32 ? __funnelshift_l(lo, hi, s) : lo;
}
inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned s) {
  return s < 32 ? __funnelshift_r(lo, hi, s) : hi;
}
inline int __mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)(((__int128)a * b) >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
// The 32 lowest bits of the product of the 24 lowest bits of each number.
inline int __mul24(int a, int b) { return int(unsigned(a << 8 >> 8) * unsigned(b << 8 >> 8)); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return (a > b ? a - b : b - a) + c; }
inline unsigned __sad(int a, int b, unsigned c) {
  return (a > b ? unsigned(a) - unsigned(b) : unsigned(b) - unsigned(a)) + c;
}
inline int __hadd(int a, int b) { return int((int64_t(a) + b) >> 1); }
inline int __rhadd(int a, int b) { return int((int64_t(a) + b + 1) >> 1); }
inline unsigned __uhadd(unsigned a, unsigned b) { return unsigned((uint64_t(a) + b) >> 1); }
inline unsigned __urhadd(unsigned a, unsigned b) { return unsigned((uint64_t(a) + b + 1) >> 1); }

namespace emulated {
// The sum of products of the bytes of two numbers, or of half words of `a` from `first` on with bytes of `b`.
template <class A, class B, class S> inline S dot_of_4(unsigned a, unsigned b, S sum) {
  for (int at = 0; at < 32; at += 8) sum = S(unsigned(sum) + unsigned(int(A(a >> at)) * int(B(b >> at))));
  return sum;
}
template <class A, class B, class S> inline S dot_of_2(unsigned a, unsigned b, S sum) {
  for (int at = 0; at < 2; at++) sum = S(unsigned(sum) + unsigned(int(A(a >> 16 * at)) * int(B(b >> 8 * at))));
  return sum;
}
}  // namespace emulated

#define EMULATED_DOTS(S, byte, word)                                                                  \
  inline S __dp4a(S a, S b, S sum) { return emulated::dot_of_4<byte, byte>(unsigned(a), unsigned(b), sum); } \
  inline S __dp2a_lo(S a, S b, S sum) { return emulated::dot_of_2<word, byte>(unsigned(a), unsigned(b), sum); } \
  inline S __dp2a_hi(S a, S b, S sum) {                                                               \
    return emulated::dot_of_2<word, byte>(unsigned(a), unsigned(b) >> 16, sum);                       \
  }
EMULATED_DOTS(int, int8_t, int16_t)
EMULATED_DOTS(unsigned, uint8_t, uint16_t)
inline int __dp4a(char4 a, char4 b, int sum) { return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
inline unsigned __dp4a(uchar4 a, uchar4 b, unsigned sum) { return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

#define EMULATED_LEAST(prefix, T)                                                                     \
  inline T prefix##min(T a, T b) { return a < b ? a : b; }                                            \
  inline T prefix##max(T a, T b) { return a > b ? a : b; }
EMULATED_LEAST(u, unsigned)
EMULATED_LEAST(ll, long long)
EMULATED_LEAST(ull, unsigned long long)
