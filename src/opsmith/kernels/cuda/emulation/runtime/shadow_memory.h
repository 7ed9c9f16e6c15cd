// Checks of each memory access: it must be within its tensor or variable, initialized, and without a race.
#pragma once
#include "requests.h"

namespace emulated {

static std::vector<Cell> shared_cells, global_cells;
static std::vector<std::vector<Cell>> region_cells;

// Begin and end of each shared variable of known size, in order, from the beginning of shared memory.
static std::vector<uint32_t> shared_extents;
static std::vector<uint32_t> shared_guards;  // guard variables of the compiler for constructed variables

// True if an access to static shared memory leaves the variable in which it begins.
static bool leaves_variable(uint64_t begin, uint64_t end) {
  const auto next = std::upper_bound(shared_extents.begin(), shared_extents.end(), uint32_t(begin));
  return (next - shared_extents.begin()) % 2 == 0 || next == shared_extents.end() || end > *next;
}

static void access_shared(uint64_t address, int size, bool write, bool atomic, uint64_t pc) {
  const uint64_t end = address + size, base = address >= dynamic_begin ? dynamic_begin : tls_begin;
  if (end > dynamic_begin && end > dynamic_end) {
    if (Report* made = report(SHARED_OUT_OF_BOUNDS, pc)) place(made, address, size, write, IN_SHARED, dynamic_begin);
    end_thread();
  }
  for (uint32_t guard : shared_guards)
    if (address - tls_begin == guard) return;
  if (address < dynamic_begin && leaves_variable(address - tls_begin, end - tls_begin)) {
    if (Report* made = report(BEYOND_SHARED_VARIABLE, pc)) place(made, address, size, write, IN_SHARED, tls_begin);
    end_thread();
  }
  bool unwritten = false;
  for (uint64_t at = address - tls_begin; at < end - tls_begin; at++) {
    Cell& cell = shared_cells[at];
    unwritten |= (!write || atomic) && !cell.written(block_begin);
    const Conflict found = enter_access(cell, write, atomic, true, uint32_t(pc));
    if (found.other.tid) report_race(found, atomic, address, size, write, IN_SHARED, base, pc);
  }
  if (unwritten)
    if (Report* made = report(UNINITIALIZED_SHARED, pc)) place(made, address, size, write, IN_SHARED, base);
}

static void access_region(int which, uint64_t address, int size, bool write, bool atomic, uint64_t pc) {
  const Region& region = regions[which];
  const uint64_t end = address + size;
  Kind kind = NONE;
  if (address < region.base || end > region.base + region.bytes) kind = OUT_OF_BOUNDS;
  else if (write && !region.writable) kind = INPUT_WRITTEN;
  if (kind) {
    if (Report* made = report(kind, pc)) place(made, address, size, write, which, region.base);
    end_thread();
  }
  bool between = false, unwritten = false;
  for (uint64_t at = (address - region.base) / region.item; at <= (end - 1 - region.base) / region.item; at++) {
    between |= region.mask && !region.mask[at];
    if (!region.writable) continue;
    Cell& cell = region_cells[which][at];
    const bool known = region.initialized || cell.written(0) || (region.written && region.written[at]);
    unwritten |= (!write || atomic) && !known;
    const Conflict found = enter_access(cell, write, atomic, false, uint32_t(pc));
    if (found.other.tid) report_race(found, atomic, address, size, write, which, region.base, pc);
  }
  if (between) {
    if (Report* made = report(BETWEEN_ELEMENTS, pc)) place(made, address, size, write, which, region.base);
    if (write) end_thread();
  }
  if (unwritten)
    if (Report* made = report(UNINITIALIZED_RESULT, pc)) place(made, address, size, write, which, region.base);
}

[[noreturn]] static void access_nowhere(uint64_t address, int size, bool write, uint64_t pc) {
  const bool on_stack = address >= (uint64_t)stacks && address < (uint64_t)stacks + stack_count * STACK;
  int64_t nearest = INT64_MAX;
  int found = NOWHERE;
  for (int which = 0; which < region_count; which++) {
    const Region& region = regions[which];
    const int64_t away = address < region.base ? region.base - address : address - region.base - region.bytes;
    if (away < nearest) nearest = away, found = which;
  }
  const bool beside = !on_stack && nearest < (1 << 20);
  if (Report* made = report(on_stack ? OTHER_STACK : beside ? OUT_OF_BOUNDS : NO_MEMORY, pc))
    place(made, address, size, write, beside ? found : NOWHERE, beside ? regions[found].base : 0);
  end_thread();
}

static void access(uint64_t address, int size, bool write, bool atomic, uint64_t pc, Use use = NO_USE) {
  if (!running) return;
  const uint64_t end = address + size, stack = stack_of(*running);
  if (address >= stack && end <= stack + STACK) return;
  if (counting) pass(pc, address, size, use ? use : atomic ? ATOMICS : write ? WRITES : READS);
  step(pc, address);
  running->last_access = pc;
  if (!write) running->read_address = address, running->read_pc = pc;
  if (write && !atomic) progress++;
  if (address >= tls_begin && address < tls_end) return access_shared(address, size, write, atomic, pc);
  for (int which = 0; which < region_count; which++)
    if (address < regions[which].base + regions[which].bytes && end > regions[which].base)
      return access_region(which, address, size, write, atomic, pc);
  if (address >= data_begin && end <= data_end) {
    for (uint64_t at = address - data_begin; at < end - data_begin; at++) {
      const Conflict found = enter_access(global_cells[at], write, atomic, false, uint32_t(pc));
      if (found.other.tid) report_race(found, atomic, address, size, write, IN_GLOBAL_VARIABLE, data_begin, pc);
    }
    return;
  }
  if (!write && address >= image_begin && end <= image_end) return;  // constants of the kernel
  access_nowhere(address, size, write, pc);
}

// Threads signal one another by volatile accesses to global memory; in shared memory, these establish no order.
static void volatile_access(void* at, int size, bool write, uint64_t pc) {
  if (!running) return;
  const uint64_t address = (uint64_t)at;
  if (!write) spin(address, pc);
  const bool signal = !is_shared(address) && fences;
  if (!signal) return access(address, size, write, false, pc);
  if (write) progress++;
  access(address, size, write, true, pc, write ? WRITES : READS);
  order_atomic(address);
}

// Marks the items that the launch has written, for the next launch, and reports unwritten elements of results.
static void report_unwritten() {
  for (int which = 0; which < region_count && !stopped; which++) {
    const Region& region = regions[which];
    if (!region.writable || region.initialized) continue;
    int64_t unwritten = 0, first = -1;
    for (uint64_t item = 0; item < region.bytes / region.item; item++) {
      const bool written = region_cells[which][item].written(0) || (region.written && region.written[item]);
      if (region.written) region.written[item] = written;
      if ((!region.mask || region.mask[item]) && !written && !unwritten++) first = item;
    }
    if (!unwritten || !region.complete) continue;
    if (Report* made = report(NOT_WRITTEN, 0, 0, nullptr, which + 1))
      made->region = which, made->offset = first * region.item, made->count = int(unwritten);
  }
}

}  // namespace emulated
