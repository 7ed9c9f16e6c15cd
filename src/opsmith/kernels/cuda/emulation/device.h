// CUDA C++ for a CPU compiler, which reads this file before an unmodified kernel. The other half is in runtime/.
#pragma once
#include <stddef.h>
// clang requires attributes on the first declaration, so they are declared before the headers of C.
// Copies that the compiler makes implicitly are checked, too.
extern "C" void* memcpy(void*, const void*, size_t) noexcept __asm__("emulated_memcpy");
extern "C" void* memmove(void*, const void*, size_t) noexcept __asm__("emulated_memmove");
extern "C" void* memset(void*, int, size_t) noexcept __asm__("emulated_memset");
#ifdef __clang__
// It copies structs by calls of C's functions, regardless of their declarations. In a kernel's object, they are these.
extern "C" void* emulated_copy(void*, const void*, size_t, void* pc, void* stack);
extern "C" void* emulated_fill(void*, int, size_t, void* pc, void* stack);
#define EMULATED_OF_C(name, T, function)                                                              \
  static void* emulated_own_##name(void*, T, size_t) __asm__(#name);                                  \
  __attribute__((used, noinline, no_sanitize("thread", "undefined", "coverage")))                     \
  static void* emulated_own_##name(void* to, T from, size_t size) {                                   \
    return function(to, from, size, __builtin_return_address(0), __builtin_dwarf_cfa());    \
  }
EMULATED_OF_C(memcpy, const void*, emulated_copy)
EMULATED_OF_C(memmove, const void*, emulated_copy)
EMULATED_OF_C(memset, int, emulated_fill)
#endif
// The heap of a GPU is not emulated. In clang, `new` is declared from the first line on.
#define EMULATED_NO_HEAP(attribute) __attribute__((attribute("the heap of a GPU is not emulated")))
extern "C" void* malloc(size_t) noexcept EMULATED_NO_HEAP(error);
#ifdef __clang__
void* operator new(size_t) EMULATED_NO_HEAP(unavailable);
void* operator new[](size_t) EMULATED_NO_HEAP(unavailable);
#else
void* operator new(size_t) EMULATED_NO_HEAP(error);
void* operator new[](size_t) EMULATED_NO_HEAP(error);
#endif
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // half of the time that <cmath> takes
#if __has_include("vector_functions.h")  // CUDA's own vector types, which its other headers need
#include "vector_types.h"
#include "vector_functions.h"
#define EMULATED_CUDA_VECTORS 1
#endif
#include <math.h>
#include <time.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include "launch_record.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __managed__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __restrict__
#undef __align__
#undef __grid_constant__
#undef __cluster_dims__
#undef __maxnreg__
// Functions that are inlined into the kernel take structs as copies, so that the runtime checks the reads.
#define __global__ __attribute__((flatten))
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
// The library's segment of thread-local memory contains only shared memory, so that its bounds are known and
// `extern __shared__` needs no change of the text.
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define EMULATED_INLINE inline __attribute__((always_inline))
#define EMULATED_UNCHECKED __attribute__((no_sanitize_thread, no_sanitize_undefined, noinline))
#ifdef __clang__
#define EMULATED_UNCOUNTED __attribute__((no_sanitize("coverage")))  // not a step of the kernel: see instrumentation.h
#else
#define EMULATED_UNCOUNTED
#endif

#ifndef EMULATED_CUDA_VECTORS
struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
#define EMULATED_VECTORS_BUT_3(T, name, align2, align4)                                               \
  struct name##1 { T x; };                                                                            \
  struct alignas(align2) name##2 { T x, y; };                                                         \
  struct alignas(align4) name##4 { T x, y, z, w; };                                                   \
  EMULATED_INLINE name##1 make_##name##1(T x) { return {x}; }                                         \
  EMULATED_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }                                 \
  EMULATED_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define EMULATED_VECTORS(T, name, align2, align4)                                                     \
  struct name##3 { T x, y, z; };                                                                      \
  EMULATED_VECTORS_BUT_3(T, name, align2, align4)                                                     \
  EMULATED_INLINE name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }
EMULATED_VECTORS(signed char, char, 2, 4)
EMULATED_VECTORS(unsigned char, uchar, 2, 4)
EMULATED_VECTORS(short, short, 4, 8)
EMULATED_VECTORS(unsigned short, ushort, 4, 8)
EMULATED_VECTORS(int, int, 8, 16)
EMULATED_VECTORS_BUT_3(unsigned, uint, 8, 16)
EMULATED_INLINE uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
EMULATED_VECTORS(long long, longlong, 16, 16)
EMULATED_VECTORS(unsigned long long, ulonglong, 16, 16)
EMULATED_VECTORS(float, float, 8, 16)
EMULATED_VECTORS(double, double, 16, 16)
#endif

using std::int16_t, std::int32_t, std::int64_t, std::int8_t;
using std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

// The runtime sets these before a thread continues. For the kernel they are constants, whose reads are not checked.
extern "C" const uint3 emulated_thread, emulated_block;
extern "C" const dim3 emulated_block_dim, emulated_grid_dim;
#define threadIdx emulated_thread
#define blockIdx emulated_block
#define blockDim emulated_block_dim
#define gridDim emulated_grid_dim
constexpr int warpSize = 32;

namespace emulated {

extern "C" {
int emulated_barrier(const char* file, int line, int kind, int value);  // 0 plain, 1 count, 2 and, 3 or
void emulated_warp(int kind, unsigned mask, const void* value, int size, int argument, int width, void* result,
                   const char* file, int line);
void emulated_atomic(const void* address, int size, void* pc, void* stack);
void emulated_sum(const void* address, int size, void* pc);
void emulated_spin(void* pc);
[[noreturn]] void emulated_trap(const char* text, const char* file, int line);
void emulated_fence();
unsigned long long emulated_clock();
}

template <class R, class T>
EMULATED_INLINE R warp(int kind, unsigned mask, const T& value, int argument, int width, const char* file, int line) {
  R result{};
  emulated_warp(kind, mask, &value, sizeof(T), argument, width, &result, file, line);
  return result;
}

template <class F, F f> struct Call;
template <class... P, void (*f)(P...)> struct Call<void (*)(P...), f> {
  template <size_t... at>
  EMULATED_UNCHECKED EMULATED_UNCOUNTED static void unpack(void** parameters, std::index_sequence<at...>) {
    f(*static_cast<std::remove_const_t<P>*>(parameters[at])...);
  }
  EMULATED_UNCHECKED EMULATED_UNCOUNTED static void call(void** parameters) {
    unpack(parameters, std::index_sequence_for<P...>());
  }
};

}  // namespace emulated

// ---- Barriers, warps and fences.

#define __syncthreads() ((void)emulated::emulated_barrier(__FILE__, __LINE__, 0, 0))
#define __syncthreads_count(p) emulated::emulated_barrier(__FILE__, __LINE__, 1, !!(p))
#define __syncthreads_and(p) emulated::emulated_barrier(__FILE__, __LINE__, 2, !!(p))
#define __syncthreads_or(p) emulated::emulated_barrier(__FILE__, __LINE__, 3, !!(p))
#define EMULATED_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
EMULATED_INLINE void __syncwarp(unsigned mask = 0xffffffffu, EMULATED_HERE) {
  emulated::emulated_warp(emulated::SYNC, mask, nullptr, 0, 0, 32, nullptr, file, line);
}
// The overloads are the same as CUDA's, so that a CPU compiler refuses the same calls as NVRTC.
#define EMULATED_SHUFFLE(name, kind, T, A)                                                            \
  EMULATED_INLINE T name(unsigned mask, T value, A by, int width = 32, EMULATED_HERE) {               \
    return emulated::warp<T>(emulated::kind, mask, value, int(by), width, file, line);                \
  }
#define EMULATED_SHUFFLES(T)                                                                          \
  EMULATED_SHUFFLE(__shfl_sync, SHUFFLE, T, int)                                                      \
  EMULATED_SHUFFLE(__shfl_up_sync, SHUFFLE_UP, T, unsigned)                                           \
  EMULATED_SHUFFLE(__shfl_down_sync, SHUFFLE_DOWN, T, unsigned)                                       \
  EMULATED_SHUFFLE(__shfl_xor_sync, SHUFFLE_XOR, T, int)
#define EMULATED_MATCH(T)                                                                             \
  EMULATED_INLINE unsigned __match_any_sync(unsigned mask, T value, EMULATED_HERE) {                  \
    return emulated::warp<unsigned>(emulated::MATCH_ANY, mask, value, 0, 32, file, line);             \
  }                                                                                                   \
  EMULATED_INLINE unsigned __match_all_sync(unsigned mask, T value, int* all, EMULATED_HERE) {        \
    const unsigned found = emulated::warp<unsigned>(emulated::MATCH_ALL, mask, value, 0, 32, file, line); \
    *all = found != 0;                                                                                \
    return found;                                                                                     \
  }
#define EMULATED_OF_NUMBERS(F) \
  F(int) F(unsigned) F(long) F(unsigned long) F(long long) F(unsigned long long) F(float) F(double)
EMULATED_OF_NUMBERS(EMULATED_SHUFFLES)
EMULATED_OF_NUMBERS(EMULATED_MATCH)
#define EMULATED_VOTE(name, kind, R)                                                                  \
  EMULATED_INLINE R name(unsigned mask, int predicate, EMULATED_HERE) {                               \
    return emulated::warp<R>(emulated::kind, mask, predicate, 0, 32, file, line);                     \
  }
EMULATED_VOTE(__any_sync, ANY, int)
EMULATED_VOTE(__all_sync, ALL, int)
EMULATED_VOTE(__ballot_sync, BALLOT, unsigned)
EMULATED_INLINE unsigned __activemask(EMULATED_HERE) {
  return emulated::warp<unsigned>(emulated::ACTIVE, 0xffffffffu, 0, 0, 32, file, line);
}
#define EMULATED_REDUCE(name, kind, T)                                                                \
  EMULATED_INLINE T __reduce_##name##_sync(unsigned mask, T value, EMULATED_HERE) {                   \
    return emulated::warp<T>(emulated::kind, mask, value, 0, 32, file, line);                         \
  }
EMULATED_REDUCE(add, ADD, unsigned)
EMULATED_REDUCE(min, MIN, unsigned)
EMULATED_REDUCE(max, MAX, unsigned)
EMULATED_REDUCE(and, AND, unsigned)
EMULATED_REDUCE(or, OR, unsigned)
EMULATED_REDUCE(xor, XOR, unsigned)
EMULATED_REDUCE(add, ADD, int)
EMULATED_REDUCE(min, MIN_SIGNED, int)
EMULATED_REDUCE(max, MAX_SIGNED, int)

EMULATED_INLINE long long clock64() { return (long long)emulated::emulated_clock(); }
#define clock() clock_t(emulated::emulated_clock())  // a function of this name is C's, in <time.h>
EMULATED_INLINE void __threadfence() { emulated::emulated_fence(); }
EMULATED_INLINE void __threadfence_block() { emulated::emulated_fence(); }
EMULATED_INLINE void __threadfence_system() { emulated::emulated_fence(); }
EMULATED_UNCHECKED inline void __nanosleep(unsigned) { emulated::emulated_spin(__builtin_return_address(0)); }
#define __trap() emulated::emulated_trap("__trap()", __FILE__, __LINE__)
#ifdef NDEBUG
#define EMULATED_ASSERT(text, ...) ((void)0)
#else
#define EMULATED_ASSERT(text, ...) \
  ((__VA_ARGS__) ? (void)0 : emulated::emulated_trap("assert(" text ")", __FILE__, __LINE__))
#endif
#undef assert
#define assert(...) EMULATED_ASSERT(#__VA_ARGS__, __VA_ARGS__)

// ---- Atomics. All threads of a launch are fibers of one thread of the CPU, so that plain code is atomic.

// The overloads are the same as CUDA's, and `long` in addition to `long long`, since int64_t and uint64_t are `long`.
#define EMULATED_CALLER __builtin_return_address(0), __builtin_dwarf_cfa()
#define EMULATED_SCOPES(name, T)                                                                      \
  EMULATED_INLINE T name##_block(T* at, T value) { return name(at, value); }                          \
  EMULATED_INLINE T name##_system(T* at, T value) { return name(at, value); }
#define EMULATED_ATOMIC(name, T, body)                                                                \
  EMULATED_UNCHECKED inline T name(T* at, T value) {                                                  \
    emulated::emulated_atomic((const void*)at, sizeof(T), EMULATED_CALLER);                           \
    T old;                                                                                            \
    __builtin_memcpy((void*)&old, (const void*)at, sizeof(T));                                        \
    const T changed = (body);                                                                         \
    __builtin_memcpy((void*)at, (const void*)&changed, sizeof(T));                                    \
    return old;                                                                                       \
  }                                                                                                   \
  EMULATED_SCOPES(name, T)
#define EMULATED_ATOMIC_OF_32(name, body) EMULATED_ATOMIC(name, int, body) EMULATED_ATOMIC(name, unsigned, body)
#define EMULATED_ATOMIC_OF_WHOLE(name, body)                                                          \
  EMULATED_ATOMIC_OF_32(name, body)                                                                   \
  EMULATED_ATOMIC(name, unsigned long, body) EMULATED_ATOMIC(name, unsigned long long, body)
#define EMULATED_ATOMIC_OF_SIGNED(name, body)                                                         \
  EMULATED_ATOMIC_OF_WHOLE(name, body)                                                                \
  EMULATED_ATOMIC(name, long, body) EMULATED_ATOMIC(name, long long, body)
#define EMULATED_ATOMIC_SUM(T, sum)                                                                   \
  EMULATED_ATOMIC(atomicAdd, T, (emulated::emulated_sum(at, sizeof(T), __builtin_return_address(0)), sum))
EMULATED_ATOMIC_OF_WHOLE(atomicAdd, old + value)
EMULATED_ATOMIC_SUM(float, old + value)
EMULATED_ATOMIC_SUM(double, old + value)
EMULATED_ATOMIC_OF_32(atomicSub, old - value)
EMULATED_ATOMIC_OF_WHOLE(atomicExch, value)
EMULATED_ATOMIC(atomicExch, float, value)
EMULATED_ATOMIC_OF_SIGNED(atomicMin, value < old ? value : old)
EMULATED_ATOMIC_OF_SIGNED(atomicMax, value > old ? value : old)
EMULATED_ATOMIC_OF_SIGNED(atomicAnd, old & value)
EMULATED_ATOMIC_OF_SIGNED(atomicOr, old | value)
EMULATED_ATOMIC_OF_SIGNED(atomicXor, old ^ value)
EMULATED_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
EMULATED_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
#define EMULATED_EXCHANGE(T)                                                                          \
  EMULATED_UNCHECKED inline T atomicCAS(T* at, T expected, T value) {                                 \
    emulated::emulated_atomic((const void*)at, sizeof(T), EMULATED_CALLER);                           \
    const T old = *at;                                                                                \
    if (old == expected) *at = value;                                                                 \
    return old;                                                                                       \
  }                                                                                                   \
  EMULATED_INLINE T atomicCAS_block(T* at, T expected, T value) { return atomicCAS(at, expected, value); } \
  EMULATED_INLINE T atomicCAS_system(T* at, T expected, T value) { return atomicCAS(at, expected, value); }
EMULATED_EXCHANGE(int)
EMULATED_EXCHANGE(unsigned)
EMULATED_EXCHANGE(unsigned long)
EMULATED_EXCHANGE(unsigned long long)
EMULATED_EXCHANGE(unsigned short)

// ---- Loads and stores with a cache policy.

#define EMULATED_LOAD(name) template <class T> EMULATED_INLINE T name(const T* at) { return *at; }
#define EMULATED_STORE(name) \
  template <class T> EMULATED_INLINE void name(T* at, std::common_type_t<T> value) { *at = value; }
EMULATED_LOAD(__ldg)
EMULATED_LOAD(__ldcg)
EMULATED_LOAD(__ldca)
EMULATED_LOAD(__ldcs)
EMULATED_LOAD(__ldlu)
EMULATED_LOAD(__ldcv)
EMULATED_STORE(__stwb)
EMULATED_STORE(__stcg)
EMULATED_STORE(__stcs)
EMULATED_STORE(__stwt)

#include "device_math.h"

#define asm static_assert(false, "opsmith_inline_ptx"); opsmith_inline_ptx
