// Order of memory accesses that barriers, warps and fences establish.
//
// Blocks run one after the other, but races are found nevertheless: two unordered accesses, one of which is a write. An
// access is identified by the thread, the epoch (barriers of all blocks so far) and the thread's clock.
#pragma once
#include <array>
#include <unordered_map>

#include "fibers.h"

namespace emulated {

constexpr uint32_t ATOMIC = 1u << 31;

struct Access { uint32_t tid, epoch, clock, pc; };  // tid + 1, 0: none; its top bit in a conflict: atomic

// Unordered accesses: the last access, the lanes of one warp, or more (`warps`, `blocks`).
struct Group {
  Access last;     // of several blocks: of the first of them
  uint32_t lanes;  // of several warps: another thread, as in `tid`
  uint32_t warps : 1, blocks : 1;
  uint32_t writes : 1;  // of atomics: one of them writes
  uint32_t clocks : 29;  // where lanes differ in their clocks: an index into `lane_accesses`, plus 1
};

// For an item of memory: the last plain write, and later reads and atomics.
struct Cell {
  Access write;
  Group reads, atomics;
  bool written(uint32_t since) const {
    return (write.tid && write.epoch >= since) || (atomics.writes && atomics.last.epoch >= since);
  }
};

// The accesses that are ordered before an event: for each thread a clock, and for each block an epoch (thread 0).
using Knowledge = std::unordered_map<uint64_t, uint32_t>;

static uint32_t epoch, block_begin;
static std::vector<uint32_t> block_starts;  // epoch in which each block began
static std::vector<uint32_t> lane_clocks;   // [thread][lane of its warp]: what of each lane comes before
static std::vector<std::array<uint32_t, WARP>> lane_accesses;  // clocks of each lane's last access to an item, in this epoch
static std::vector<Knowledge> acquired;     // of each thread, by atomics; since the last barrier
static Knowledge block_acquired;
static std::unordered_map<uint64_t, Knowledge> released;  // by address of an atomic
static bool fences;

static inline uint32_t thread_of(const Access& access) { return (access.tid & ~ATOMIC) - 1; }
static inline uint32_t block_of(uint32_t at) {
  return uint32_t(std::upper_bound(block_starts.begin(), block_starts.end(), at) - block_starts.begin()) - 1;
}
static inline uint64_t key(uint32_t block, uint32_t thread) { return uint64_t(block) << 12 | thread; }

static void learn(Knowledge& into, const Knowledge& from) {
  for (const auto& [who, when] : from) {
    uint32_t& known = into[who];
    known = std::max(known, when);
  }
}

static bool is_known(const Knowledge& known, uint32_t block, const Access& past) {
  const auto of_block = known.find(key(block, 0));
  if (of_block != known.end() && past.epoch < of_block->second) return true;
  const auto of_thread = known.find(key(block, thread_of(past) + 1));
  return of_thread != known.end() && past.clock <= of_thread->second;
}

static bool by_fence(const Access& past) {
  if (!fences) return false;
  const uint32_t block = block_of(past.epoch);
  return is_known(block_acquired, block, past) || is_known(acquired[running->tid], block, past);
}

// The lanes of the running thread's warp whose accesses are not ordered before the current access.
static uint32_t unordered_lanes(const Group& past) {
  const uint32_t mine = running->tid;
  uint32_t found = 0;
  for (uint32_t left = past.lanes & ~(1u << mine % WARP); left; left &= left - 1) {
    const uint32_t lane = __builtin_ctz(left);
    const uint32_t clock = past.clocks ? lane_accesses[past.clocks - 1][lane] : past.last.clock;
    if (lane_clocks[mine * WARP + lane] < clock) found |= left & -left;
  }
  return found;
}

// True if accesses are ordered before the current access of the running thread.
static bool is_before(const Group& past) {
  if (past.blocks) return false;
  if (past.last.epoch >= block_begin && past.last.epoch != epoch) return true;
  const bool in_warp = past.last.epoch >= block_begin && thread_of(past.last) / WARP == uint32_t(running->tid) / WARP;
  if (past.warps) return false;
  if (in_warp && !unordered_lanes(past)) return true;
  return !(past.lanes & (past.lanes - 1)) && by_fence(past.last);
}

static bool is_before(const Access& past) { return is_before(Group{past, 1u << thread_of(past) % WARP, 0, 0, 0, 0}); }

// Records the clock of a lane that joins other lanes, whose clocks may differ.
static void enter_clock(Group& group, uint32_t lane) {
  if (!group.clocks) {
    if (group.last.clock == running->clock) return;
    lane_accesses.emplace_back().fill(group.last.clock);
    group.clocks = uint32_t(lane_accesses.size());
  }
  lane_accesses[group.clocks - 1][lane] = running->clock;
}

// An access of a group, by another thread, that is not ordered before the running thread.
static Access foreign_access(const Group& group) {
  Access other = group.last;
  if (group.blocks || other.epoch < block_begin) return other;
  if (group.warps) {
    if (other.tid == uint32_t(running->tid) + 1) other.tid = group.lanes;
  } else if (thread_of(other) / WARP == uint32_t(running->tid) / WARP) {
    if (const uint32_t lanes = unordered_lanes(group)) other.tid = running->tid / WARP * WARP + __builtin_ctz(lanes) + 1;
  }
  return other;
}

// Two unordered accesses to an item; `other.tid` is 0 if there are none.
struct Conflict { Access other; bool other_write; };

// Records an access in a cell. `within`: shared memory, which is new for each block.
static inline Conflict enter_access(Cell& cell, bool write, bool atomic, bool within, uint32_t pc) {
  const uint32_t me = running->tid + 1, bit = 1u << (running->tid % WARP);
  const auto foreign = [](const Access& past) { return past.epoch < block_begin; };
  const auto counts = [&](const Access& past) { return past.tid && !(within && foreign(past)); };
  const auto enter = [&](Group& group) {
    if (!counts(group.last) || is_before(group)) {
      // Accesses that are ordered before this one need not be kept.
      group = {{}, bit, 0, 0, 0, group.last.epoch == epoch ? uint32_t(group.clocks) : 0};
      if (group.clocks) lane_accesses[group.clocks - 1][running->tid % WARP] = running->clock;
    } else if (foreign(group.last)) {
      group.blocks = 1;
      return;
    } else if (group.warps || thread_of(group.last) / WARP != uint32_t(running->tid) / WARP) {
      group.warps = 1;
      if (group.last.tid != me) group.lanes = group.last.tid;
    } else {
      group.lanes |= bit;
      enter_clock(group, running->tid % WARP);
    }
    group.last = {me, epoch, running->clock, pc};
  };
  Conflict found{};
  const Access& last = cell.write;
  if (counts(last) && (last.tid != me || foreign(last)) && !is_before(last))
    found = {last, true};
  const bool stored = counts(cell.atomics.last) && cell.atomics.writes;
  if (!found.other.tid && !atomic && (write || stored) && counts(cell.atomics.last) && !is_before(cell.atomics)) {
    found = {foreign_access(cell.atomics), stored};
    found.other.tid |= ATOMIC;
  }
  if (write && counts(cell.reads.last) && !is_before(cell.reads)) found = {foreign_access(cell.reads), false};
  if (atomic) {
    if (fences) cell.atomics = {};  // an atomic comes after those before it at the address: see order_atomic
    enter(cell.atomics);
    cell.atomics.writes = stored || write;
  } else if (write) {
    cell = {{me, epoch, running->clock, pc}, {}, {}};
  } else {
    enter(cell.reads);
  }
  return found;
}

// An atomic acquires everything that earlier atomics at the address released. It releases the accesses of its thread
// before a fence.
static void order_atomic(uint64_t address) {
  if (!fences) return;
  Knowledge &mine = acquired[running->tid], &there = released[address];
  learn(mine, there);
  if (!running->fence_clock) return;
  learn(there, mine);
  learn(there, block_acquired);
  const uint32_t block = uint32_t(block_starts.size()) - 1;
  there[key(block, 0)] = std::max(there[key(block, 0)], running->fence_epoch);
  there[key(block, running->tid + 1)] = running->fence_clock;
}

static void order_warp(int first, unsigned members) {
  uint32_t all[WARP] = {};
  Knowledge together;
  for (unsigned left = members; left; left &= left - 1) {
    const int at = first + __builtin_ctz(left);
    for (int lane = 0; lane < WARP; lane++) all[lane] = std::max(all[lane], lane_clocks[at * WARP + lane]);
    all[at - first] = std::max(all[at - first], fibers[at].clock);
    if (fences) learn(together, acquired[at]);
  }
  for (unsigned left = members; left; left &= left - 1) {
    const int at = first + __builtin_ctz(left);
    std::copy(all, all + WARP, &lane_clocks[at * WARP]);
    fibers[at].clock++;
    if (fences) acquired[at] = together;
  }
}

static void order_block() {
  epoch++;
  lane_accesses.clear();
  if (fences)
    for (Knowledge& each : acquired) learn(block_acquired, each), each.clear();
}

static void begin_block() {
  block_begin = ++epoch;
  lane_accesses.clear();
  block_starts.push_back(epoch);
  std::fill(lane_clocks.begin(), lane_clocks.end(), 0);
  block_acquired.clear();
  for (Knowledge& each : acquired) each.clear();
}

}  // namespace emulated
