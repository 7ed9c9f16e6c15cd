// Threads of a block as fibers: each has a separate stack, and runs until it waits or returns.
#pragma once
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>
#if !defined(__x86_64__)
#define EMULATED_UCONTEXT 1
#endif
#if EMULATED_UCONTEXT
#include <ucontext.h>
#endif

#include <algorithm>
#include <vector>

#include "launch_record.h"

namespace emulated {

constexpr size_t STACK = 256 << 10, GUARD = 64 << 10;  // the guard is inaccessible: a stack overflow faults there
constexpr int WARP = 32;

enum State : uint8_t { READY, AT_BARRIER, AT_WARP, DONE };

// An operation of a warp in which a lane takes part: its input and its result.
struct WarpOperation {
  int kind, size, argument, width, line;
  unsigned mask;
  unsigned char value[16], result[16];
  const char* file;
};

struct Fiber {
  void* stack_pointer;
#if EMULATED_UCONTEXT
  ucontext_t context;
#endif
  Index index;
  int tid;
  State state;
  bool killed;
  const char* file;  // of the barrier at which it waits
  int line, kind, value, answer;
  uint64_t barriers;  // a set of lines, modulo 64, of barriers that it has passed
  uint32_t clock;     // rises with each operation that orders memory
  uint32_t fence_clock, fence_epoch;  // of its last fence; 0: none
  uint64_t steps, last_access, read_address, read_pc, spin_address;
  uint32_t spins;
  WarpOperation warp;
};

static std::vector<Fiber> fibers;
static Fiber* running;
static char* stacks;
static size_t stack_count;
static void (*thread_body)();

static inline uint64_t stack_of(const Fiber& fiber) { return (uint64_t)stacks + fiber.tid * STACK; }

static bool reserve_stacks(size_t threads) {
  if (stack_count >= threads) return true;
  if (stacks) munmap(stacks, stack_count * STACK);
  stack_count = 0;
  const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  stacks = (char*)mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE, kind, -1, 0);
  if (stacks == MAP_FAILED) return stacks = nullptr, false;
  for (size_t at = 0; at < threads; at++) mprotect(stacks + at * STACK, GUARD, PROT_NONE);
  stack_count = threads;
  return true;
}

#if EMULATED_UCONTEXT
static ucontext_t scheduler;
static void prepare(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = (char*)stack_of(fiber) + GUARD;
  fiber.context.uc_stack.ss_size = STACK - GUARD;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, thread_body, 0);
}
static void enter(Fiber& fiber) { swapcontext(&scheduler, &fiber.context); }
static void leave() { swapcontext(&running->context, &scheduler); }
#else
// Saves the registers that a function must preserve (System V ABI), and continues where `to` was left.
asm(R"(
.text
.type emulated_switch,@function
emulated_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emulated_switch,.-emulated_switch
)");
extern "C" void emulated_switch(void** save, void* to);
static void* scheduler;
static void prepare(Fiber& fiber) {
  void** at = (void**)(stack_of(fiber) + STACK - 64);
  *--at = nullptr;  // so that the stack is aligned as after a call
  *--at = (void*)thread_body;
  for (int saved = 0; saved < 6; saved++) *--at = nullptr;
  fiber.stack_pointer = at;
}
static void enter(Fiber& fiber) { emulated_switch(&scheduler, fiber.stack_pointer); }
static void leave() { emulated_switch(&running->stack_pointer, scheduler); }
#endif

}  // namespace emulated
