// Steps of threads: count them, and end threads that run too long or only wait.
#pragma once
#include <string.h>

#include "reports.h"

namespace emulated {

extern "C" {
Index emulated_thread, emulated_block, emulated_block_dim, emulated_grid_dim;  // as the kernel sees them
}

static uint64_t block_end;  // steps after which this block is too long, or endless
static uint64_t progress;   // rises when a thread does something for which another may wait

constexpr uint32_t SPINS = 1024;  // at one address, until another thread continues

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

constexpr size_t WINDOW = 1 << 14;  // number of last steps that are compared with one another
static std::vector<uint64_t> window;
static const Fiber* watched;
static uint64_t elsewhere;  // steps of other threads since the last of the watched one

// True if the last steps are a repeated sequence, by the failure function of D. Knuth, J. Morris and V. Pratt ("Fast
// pattern matching in strings", 1977).
static bool window_repeats() {
  std::vector<size_t> border(window.size());
  for (size_t at = 1, length = 0; at < window.size(); border[at++] = length) {
    while (length && window[at] != window[length]) length = border[length - 1];
    length += window[at] == window[length];
  }
  return window.size() - border.back() <= WINDOW / 4;
}

// A thread, or its block, has used all its steps: it is endless if it only repeats the same steps.
static void watch(uint64_t pc, uint64_t address) {
  if (watched != running) {
    const bool waits = watched && watched->state != DONE && ++elsewhere < WINDOW * fibers.size();
    if (waits) return;
    watched = running, window.clear();
  }
  elsewhere = 0;
  window.push_back(pc << 32 ^ address);
  if (window.size() == WINDOW) too_long(window_repeats() ? ENDLESS : TOO_LONG, pc);
}

static void step(uint64_t pc, uint64_t address = 0) {
  running->steps++;
  if (++outcome->steps > options.steps) too_long(TOO_LONG, pc);
  if (running->steps > options.thread_steps || outcome->steps > block_end) watch(pc, address);
}

// The last atomic counts as progress if it has changed the value.
static struct { const void* at; size_t size; unsigned char value[16]; } last_atomic;

static void settle_atomic() {
  if (last_atomic.at && memcmp(last_atomic.at, last_atomic.value, last_atomic.size)) progress++;
  last_atomic.at = nullptr;
}

static void begin_atomic(const void* at, size_t size) {
  settle_atomic();
  last_atomic.at = at, last_atomic.size = std::min(size, sizeof last_atomic.value);
  memcpy(last_atomic.value, at, last_atomic.size);
}

// A thread reads again a value that another thread may change.
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
