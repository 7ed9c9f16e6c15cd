// Instructions that code is compiled to use, as bits; and those of them that this processor lacks.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#define OPSMITH_INSTRUCTIONS(X)                                                                              \
  X(0, __AVX__, "avx") X(1, __AVX2__, "avx2") X(2, __FMA__, "fma") X(3, __BMI__, "bmi")                      \
  X(4, __BMI2__, "bmi2") X(5, __AVX512F__, "avx512f") X(6, __AVX512BW__, "avx512bw")                         \
  X(7, __AVX512DQ__, "avx512dq") X(8, __AVX512VL__, "avx512vl") X(9, __AVX512CD__, "avx512cd")               \
  X(10, __AVX512VBMI__, "avx512vbmi") X(11, __AVX512VNNI__, "avx512vnni")                                    \
  X(12, __AVX512BITALG__, "avx512bitalg") X(13, __AVX512VPOPCNTDQ__, "avx512vpopcntdq")                      \
  X(14, __AVX512IFMA__, "avx512ifma") X(15, __FMA4__, "fma4") X(16, __XOP__, "xop")
#else
#define OPSMITH_INSTRUCTIONS(X)
#endif

namespace {
// A macro of the compiler is 1 where it may use the instructions; else the name stays what it is.
#define OPSMITH_SHOWN(macro) #macro
#define OPSMITH_USED(bit, macro, name) | (OPSMITH_SHOWN(macro)[0] == '1' ? 1u << bit : 0u)
[[maybe_unused]] constexpr uint32_t used_instructions = 0 OPSMITH_INSTRUCTIONS(OPSMITH_USED);

// The first that is needed and missing; null where there is none.
[[maybe_unused]] const char* missing_instruction(uint32_t needs) {
  (void)needs;
#define OPSMITH_MISSING(bit, macro, name) \
  if ((needs >> bit & 1) && !__builtin_cpu_supports(name)) return name;
  OPSMITH_INSTRUCTIONS(OPSMITH_MISSING)
  return nullptr;
}
}  // namespace
