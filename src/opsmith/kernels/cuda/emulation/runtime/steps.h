// Steps of threads: where they are, and what ends a thread that runs too long, or that only waits.
#pragma once
#include "reports.h"

namespace emulated {

extern "C" {
Index emulated_thread, emulated_block, emulated_block_dim, emulated_grid_dim;  // as the kernel sees them
}

static uint64_t block_end;  // steps at which this block is endless
static uint64_t progress;   // rises where a thread does what another may wait for

constexpr uint32_t SPINS = 1024;  // at one address, until another thread goes on

[[noreturn]] static void end_thread() {
  running->killed = true;
  running->state = DONE;
  leave();
  __builtin_unreachable();
}

[[noreturn]] static void too_long(Kind kind, uint64_t pc) {
  report(kind, pc);
  stopped = true;
  end_thread();
}

static void step(uint64_t pc) {
  if (++running->steps > options.thread_steps) too_long(ENDLESS, pc);
  if (++outcome->steps > block_end) too_long(outcome->steps > options.steps ? TOO_LONG : ENDLESS, pc);
}

// A thread looks again at what another one may change.
static void spin(uint64_t address, uint64_t pc) {
  if (running->spin_address != address) running->spin_address = address, running->spins = 0;
  running->last_access = pc;
  if (++running->spins % SPINS == 0) leave();
}

extern "C" void emulated_trap(const char* text, const char* file, int line) {
  if (Report* made = report(TRAP, 0, 0, file, line)) made->text = text;
  end_thread();
}

}  // namespace emulated
