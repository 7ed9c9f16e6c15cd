// Order of accesses to memory: which of them a barrier, a warp or a fence puts one after the other.
//
// Blocks run one after the other, and a race is found nevertheless: two accesses, one of them a write, with nothing
// that orders them. An access is known by the thread, the epoch (barriers of all blocks so far) and the thread's clock.
#pragma once
#include <unordered_map>

#include "fibers.h"

namespace emulated {

constexpr uint32_t ATOMIC = 1u << 31;

struct Access { uint32_t tid, epoch, clock, pc; };  // tid + 1, 0: none; its top bit in a conflict: atomic

// Accesses that nothing orders: the last of them, the lanes of one warp, or more (`warps`, `blocks`).
struct Group {
  Access last;
  uint32_t lanes;
  uint16_t warps, blocks;
};

// Of an item of memory the last plain write, and the reads and atomics since then.
struct Cell {
  Access write;
  Group reads, atomics;
  bool written(uint32_t since) const {
    return (write.tid && write.epoch >= since) || (atomics.last.tid && atomics.last.epoch >= since);
  }
};

// What comes before something: for each thread a clock, and for each block an epoch (thread 0).
using Knowledge = std::unordered_map<uint64_t, uint32_t>;

static uint32_t epoch, block_begin;
static std::vector<uint32_t> block_starts;  // epoch in which each block began
static std::vector<uint32_t> lane_clocks;   // [thread][lane of its warp]: what of each lane comes before
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

// True if accesses of a warp's lanes come before what the running thread does now.
static bool is_before(const Access& past, uint32_t lanes, bool warps) {
  if (past.epoch >= block_begin && past.epoch != epoch) return true;
  const uint32_t thread = thread_of(past), mine = running->tid;
  if (past.epoch >= block_begin && !warps && thread / WARP == mine / WARP) {
    bool all = true;
    for (uint32_t left = lanes; left && all; left &= left - 1) {
      const uint32_t lane = __builtin_ctz(left);
      all = lane == mine % WARP || lane_clocks[mine * WARP + lane] >= past.clock;
    }
    if (all) return true;
  }
  return !warps && !(lanes & (lanes - 1)) && by_fence(past);
}

// Two accesses to an item without an order; `other.tid` 0 for none.
struct Conflict { Access other; bool other_write; };

// Enters an access into a cell. `within`: shared memory, which each block has anew.
static inline Conflict enter_access(Cell& cell, bool write, bool atomic, bool within, uint32_t pc) {
  const uint32_t me = running->tid + 1, bit = 1u << (running->tid % WARP);
  const auto foreign = [](const Access& past) { return past.epoch < block_begin; };
  const auto counts = [&](const Access& past) { return past.tid && !(within && foreign(past)); };
  const auto is_group_before = [&](const Group& past) { return !past.blocks && is_before(past.last, past.lanes, past.warps); };
  const auto enter = [&](Group& group) {
    if (!counts(group.last) || is_group_before(group)) {
      group = {{}, bit, 0, 0};  // those that come before this one need not be remembered
    } else if (foreign(group.last)) {
      group.lanes = bit, group.warps = 0, group.blocks = 1;
    } else if (thread_of(group.last) / WARP != uint32_t(running->tid) / WARP) {
      group.warps = 1;
    } else {
      group.lanes |= bit;
    }
    group.last = {me, epoch, running->clock, pc};
  };
  Conflict found{};
  const Access& last = cell.write;
  if (counts(last) && (last.tid != me || foreign(last)) && !is_before(last, 1u << thread_of(last) % WARP, false))
    found = {last, true};
  if (!found.other.tid && !atomic && counts(cell.atomics.last) && !is_group_before(cell.atomics)) {
    found = {cell.atomics.last, true};
    found.other.tid |= ATOMIC;
  }
  if (write && counts(cell.reads.last) && !is_group_before(cell.reads)) found = {cell.reads.last, false};
  if (atomic) {
    if (fences) cell.atomics = {};  // an atomic comes after those before it at the address: see order_atomic
    enter(cell.atomics);
  } else if (write) {
    cell = {{me, epoch, running->clock, pc}, {}, {}};
  } else {
    enter(cell.reads);
  }
  return found;
}

// An atomic takes what those before it at the address have released, and releases what its thread did before a fence.
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
  if (fences)
    for (Knowledge& each : acquired) learn(block_acquired, each), each.clear();
}

static void begin_block() {
  block_begin = ++epoch;
  block_starts.push_back(epoch);
  std::fill(lane_clocks.begin(), lane_clocks.end(), 0);
  block_acquired.clear();
  for (Knowledge& each : acquired) each.clear();
}

}  // namespace emulated
