// Functions that the compiler calls for -fsanitize and -fsanitize-coverage, and device.h for atomics and fences.
#pragma once
#include <string.h>

#include "shadow_memory.h"
#include "sums.h"

namespace emulated {

static uint64_t caller(void* return_address, void* stack) {
  caller_stack = (uint64_t)stack;
  return code(return_address);
}
#define PC caller(__builtin_return_address(0), __builtin_dwarf_cfa())

extern "C" {
void __sanitizer_cov_trace_pc() {
  if (!running) return;
  const uint64_t pc = PC;
  step(pc);
  if (counting) pass(pc, 0, 0, NO_USE);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define ACCESS(n)                                                                                     \
  void __tsan_read##n(void* at) { access((uint64_t)at, n, false, false, PC); }                        \
  void __tsan_write##n(void* at) { access((uint64_t)at, n, true, false, PC); }                        \
  void __tsan_unaligned_read##n(void* at) { access((uint64_t)at, n, false, false, PC); }              \
  void __tsan_unaligned_write##n(void* at) { access((uint64_t)at, n, true, false, PC); }              \
  void __tsan_volatile_read##n(void* at) { volatile_access(at, n, false, PC); }                       \
  void __tsan_volatile_write##n(void* at) { volatile_access(at, n, true, PC); }                       \
  void __tsan_unaligned_volatile_read##n(void* at) { volatile_access(at, n, false, PC); }             \
  void __tsan_unaligned_volatile_write##n(void* at) { volatile_access(at, n, true, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void* at, size_t size) { access((uint64_t)at, int(size), false, false, PC); }
void __tsan_write_range(void* at, size_t size) { access((uint64_t)at, int(size), true, false, PC); }
static void* copy(void* to, const void* from, size_t size, uint64_t pc) {
  if (size) access((uint64_t)from, int(size), false, false, pc), access((uint64_t)to, int(size), true, false, pc);
  return memmove(to, from, size);
}
static void* fill(void* to, int value, size_t size, uint64_t pc) {
  if (size) access((uint64_t)to, int(size), true, false, pc);
  return memset(to, value, size);
}
void* emulated_copy(void* to, const void* from, size_t size, void* return_address, void* stack) {
  if (!running || !running->steps) return memmove(to, from, size);  // parameters, before the kernel begins
  return copy(to, from, size, caller(return_address, stack));
}
void* emulated_fill(void* to, int value, size_t size, void* return_address, void* stack) {
  return fill(to, value, size, caller(return_address, stack));
}
void* emulated_memcpy(void* to, const void* from, size_t size) { return copy(to, from, size, PC); }
void* emulated_memmove(void* to, const void* from, size_t size) { return copy(to, from, size, PC); }
void* emulated_memset(void* to, int value, size_t size) { return fill(to, value, size, PC); }
void* __tsan_memcpy(void* to, const void* from, size_t size) { return copy(to, from, size, PC); }
void* __tsan_memmove(void* to, const void* from, size_t size) { return copy(to, from, size, PC); }
void* __tsan_memset(void* to, int value, size_t size) { return fill(to, value, size, PC); }

void emulated_atomic(const void* at, int size, void* return_address, void* stack) {
  const uint64_t address = (uint64_t)at, pc = caller(return_address, stack);
  if (address % size) {
    if (Report* made = report(MISALIGNED, pc)) made->size = size, made->write = 1;
    end_thread();
  }
  if (running->read_address == address) guesses.insert(running->read_pc);
  spin(address, pc);
  access(address, size, true, true, pc);
  begin_atomic(at, size);
  order_atomic(address);
}
void emulated_sum(const void* at, int size, void* return_address) {
  const uint64_t address = (uint64_t)at;
  if (!adds_unordered(address)) return;
  const int region = region_of(address);
  if (Report* made = report(UNORDERED_SUM, code(return_address))) place(made, address, size, true, region, address);
}
void emulated_spin(void* return_address) { spin(0, code(return_address)); }
uint64_t emulated_clock() { return outcome->steps; }
void emulated_fence() {
  fences = true;
  running->fence_clock = running->clock++, running->fence_epoch = epoch;
}

struct Source { const char* file; uint32_t line, column; };
struct TypeName { uint16_t kind, info; char name[]; };
struct Mismatch { Source at; TypeName* type; uint8_t alignment, check; };
void __ubsan_handle_type_mismatch_v1(Mismatch* data, void* at) {
  if (!running) return;
  const uint64_t address = (uint64_t)at;
  if (Report* made = report(MISALIGNED, PC, 0, data->at.file, int(data->at.line))) {
    made->text = data->type->name, made->size = 1 << data->alignment;
    for (int which = 0; which < region_count; which++)
      if (address - regions[which].base < regions[which].bytes)
        made->region = which, made->offset = int64_t(address - regions[which].base);
    if (is_shared(address)) made->region = IN_SHARED, made->offset = int64_t(address - dynamic_begin);
  }
  end_thread();  // as on a GPU; vector instructions of the CPU would fault, too
}
static void undefined(Kind kind, const Source& at, const char* text, uint64_t pc) {
  if (!running) return;
  if (Report* made = report(kind, pc, 0, at.file, int(at.line))) made->text = text;
}
void __ubsan_handle_out_of_bounds(Source* at, void*) { undefined(ARRAY_INDEX, *at, "", PC); }
void __ubsan_handle_shift_out_of_bounds(Source* at, void*, void*) {
  undefined(UNDEFINED, *at, "it shifts by a negative number of bits, or by at least the number's width", PC);
}
void __ubsan_handle_divrem_overflow(Source* at, void*, void*) {
  undefined(UNDEFINED, *at, "it divides a whole number by zero", PC);
  if (running) end_thread();
}
void __ubsan_handle_missing_return(Source* at) {
  undefined(UNDEFINED, *at, "a function that returns a value ends without one", PC);
  if (running) end_thread();
}
void __ubsan_handle_builtin_unreachable(Source* at) { __ubsan_handle_missing_return(at); }
}  // extern "C"

}  // namespace emulated
