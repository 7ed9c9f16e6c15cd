// Instructions that compiled code may use, as bits, and the first of them that this processor lacks.
//
// Some compilers that build kernels do not know the names in the second table. Their bits come from Intel's
// Architecture Instruction Set Extensions Programming Reference (319433), table of CPUID. `avx` and `avx512f`, which
// come with them, show whether the system supports the registers that they need.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#define OPSMITH_INSTRUCTIONS(X)                                                                              \
  X(0, __AVX__, "avx") X(1, __AVX2__, "avx2") X(2, __FMA__, "fma") X(3, __BMI__, "bmi")                      \
  X(4, __BMI2__, "bmi2") X(5, __AVX512F__, "avx512f") X(6, __AVX512BW__, "avx512bw")                         \
  X(7, __AVX512DQ__, "avx512dq") X(8, __AVX512VL__, "avx512vl") X(9, __AVX512CD__, "avx512cd")               \
  X(10, __AVX512VBMI__, "avx512vbmi") X(11, __AVX512VNNI__, "avx512vnni")                                    \
  X(12, __AVX512BITALG__, "avx512bitalg") X(13, __AVX512VPOPCNTDQ__, "avx512vpopcntdq")                      \
  X(14, __AVX512IFMA__, "avx512ifma") X(15, __FMA4__, "fma4") X(16, __XOP__, "xop")                          \
  X(17, __POPCNT__, "popcnt")
// Each with its leaf, subleaf, register (0 is EAX) and bit.
#define OPSMITH_MORE_INSTRUCTIONS(X)                                                                         \
  X(18, __F16C__, "f16c", 1, 0, 2, 29) X(19, __MOVBE__, "movbe", 1, 0, 2, 22)                                \
  X(20, __LZCNT__, "lzcnt", 0x80000001, 0, 2, 5) X(21, __AVX512VBMI2__, "avx512vbmi2", 7, 0, 2, 6)           \
  X(22, __GFNI__, "gfni", 7, 0, 2, 8) X(23, __VAES__, "vaes", 7, 0, 2, 9)                                    \
  X(24, __VPCLMULQDQ__, "vpclmulqdq", 7, 0, 2, 10) X(25, __AVX512FP16__, "avx512fp16", 7, 0, 3, 23)          \
  X(26, __AVX512BF16__, "avx512bf16", 7, 1, 0, 5) X(27, __AVXVNNI__, "avxvnni", 7, 1, 0, 4)                  \
  X(28, __AVXIFMA__, "avxifma", 7, 1, 0, 23) X(29, __AVXVNNIINT8__, "avxvnniint8", 7, 1, 3, 4)               \
  X(30, __AVXNECONVERT__, "avxneconvert", 7, 1, 3, 5)                                                        \
  X(31, __AVX512VP2INTERSECT__, "avx512vp2intersect", 7, 0, 3, 8)
#else
#define OPSMITH_INSTRUCTIONS(X)
#define OPSMITH_MORE_INSTRUCTIONS(X)
#endif

namespace {
// The compiler's macro is 1 if it may use the instructions; otherwise the name stays undefined.
#define OPSMITH_SHOWN(macro) #macro
#define OPSMITH_USED(bit, macro, ...) | (OPSMITH_SHOWN(macro)[0] == '1' ? 1u << bit : 0u)
[[maybe_unused]] constexpr uint32_t used_instructions =
    0 OPSMITH_INSTRUCTIONS(OPSMITH_USED) OPSMITH_MORE_INSTRUCTIONS(OPSMITH_USED);

#if defined(__x86_64__)
[[maybe_unused]] bool processor_has(uint32_t leaf, uint32_t part, int word, int bit) {
  uint32_t words[4] = {};
  if (!__get_cpuid_count(leaf, part, words, words + 1, words + 2, words + 3)) return false;
  return words[word] >> bit & 1;
}
#endif

// The first needed instruction set that is missing; null if none is missing.
[[maybe_unused]] const char* missing_instruction(uint32_t needs) {
  (void)needs;
#define OPSMITH_MISSING(bit, macro, name) \
  if ((needs >> bit & 1) && !__builtin_cpu_supports(name)) return name;
  OPSMITH_INSTRUCTIONS(OPSMITH_MISSING)
#define OPSMITH_MORE_MISSING(bit, macro, name, leaf, part, word, at) \
  if ((needs >> bit & 1) && !processor_has(leaf, part, word, at)) return name;
  OPSMITH_MORE_INSTRUCTIONS(OPSMITH_MORE_MISSING)
  return nullptr;
}
}  // namespace
