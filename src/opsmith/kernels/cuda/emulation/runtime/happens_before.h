// Order of accesses to memory: which of them a barrier, a warp or a fence puts one after the other.
//
// Blocks run one after the other, and a race is found nevertheless: two accesses, one of them a write, with nothing
// that orders them. An access is known by the thread, the epoch (barriers of all blocks so far) and the thread's clock.
#pragma once
#include <unordered_map>

#include "fibers.h"

namespace emulated {

constexpr uint32_t ATOMIC = 1u << 31;

struct Access { uint32_t tid, epoch, clock, pc; };  // tid + 1, 0: none; its top bit: atomic

// Of an item of memory the last write, and the reads since then: lanes of one warp, or of several (`warps`).
struct Cell {
  Access write, read;
  uint32_t lanes;
  uint16_t warps, blocks;
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
  const uint32_t me = running->tid + 1;
  Conflict found{};
  const auto foreign = [&](const Access& past) { return past.epoch < block_begin; };
  Access& last = cell.write;
  if (last.tid && !(within && foreign(last)) && !(atomic && last.tid & ATOMIC) &&
      ((last.tid & ~ATOMIC) != me || foreign(last)) && !is_before(last, 1u << thread_of(last) % WARP, false))
    found = {last, true};
  Access& seen = cell.read;
  if (write) {
    if (seen.tid && !(within && foreign(seen)) && (cell.blocks || !is_before(seen, cell.lanes, cell.warps)))
      found = {seen, false};
    last = {me | (atomic ? ATOMIC : 0), epoch, running->clock, pc};
    if (!atomic) seen.tid = 0, cell.lanes = 0, cell.warps = 0, cell.blocks = 0;
    return found;
  }
  const uint32_t bit = 1u << (running->tid % WARP);
  if (!seen.tid || (within && foreign(seen)) || is_before(seen, cell.lanes, cell.warps)) {
    cell.lanes = bit, cell.warps = 0;  // reads that come before this one need not be remembered
  } else if (foreign(seen)) {
    cell.lanes = bit, cell.warps = 0, cell.blocks = 1;
  } else if (thread_of(seen) / WARP != uint32_t(running->tid) / WARP) {
    cell.warps = 1;
  } else {
    cell.lanes |= bit;
  }
  seen = {me, epoch, running->clock, pc};
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
