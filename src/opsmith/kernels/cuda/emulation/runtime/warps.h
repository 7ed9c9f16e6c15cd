// Operations of a warp: shuffles, votes, `__syncwarp()` and `__activemask()`.
#pragma once
#include <string.h>

#include "steps.h"

namespace emulated {

static bool is_shuffle(int kind) { return kind >= SHUFFLE && kind <= SHUFFLE_XOR; }

extern "C" void emulated_warp(int kind, unsigned mask, const void* value, int size, int argument, int width,
                              void* result, const char* file, int line) {
  WarpOperation& warp = running->warp;
  warp = {kind, size, argument, width, line, mask, {}, {}, file};
  if (value) memcpy(warp.value, value, size);
  if (!(mask >> (running->tid % WARP) & 1))
    if (Report* made = report(NOT_IN_MASK, 0, 0, file, line)) made->size = running->tid % WARP;
  running->state = AT_WARP;
  leave();
  if (result) memcpy(result, running->warp.result, is_shuffle(kind) ? size : 4);
}

// A shuffle, as in the PTX manual (shfl.sync).
static void shuffle(int first, unsigned members, Fiber& mine) {
  WarpOperation& own = mine.warp;
  const int lane = mine.tid % WARP, width = own.width, segment = lane & ~(width - 1), last = segment + width - 1;
  int from = lane;
  bool moves = true;
  if (own.kind == SHUFFLE) from = segment + (own.argument & (width - 1));
  if (own.kind == SHUFFLE_UP) from = lane - own.argument, moves = from >= segment;
  if (own.kind == SHUFFLE_DOWN) from = lane + own.argument, moves = from <= last;
  if (own.kind == SHUFFLE_XOR) from = lane ^ own.argument, moves = from <= last;
  if (!moves) from = lane;
  if (members >> from & 1) {
    memcpy(own.result, fibers[first + from].warp.value, own.size);
    return;
  }
  running = &mine;
  if (Report* made = report(ABSENT_LANE, 0, 0, own.file, own.line)) made->size = from;
  running = nullptr;
  memset(own.result, 0xff, sizeof own.result);
}

static void vote(int first, unsigned members, Fiber& mine) {
  WarpOperation& own = mine.warp;
  const auto number = [](const WarpOperation& from) {
    uint32_t value;
    memcpy(&value, from.value, sizeof value);
    return value;
  };
  uint32_t given = 0, same = 0, folded = number(own);
  for (unsigned left = members; left; left &= left - 1) {
    const int at = __builtin_ctz(left);
    const WarpOperation& each = fibers[first + at].warp;
    const uint32_t value = number(each);
    if (value) given |= 1u << at;
    if (!memcmp(each.value, own.value, own.size)) same |= 1u << at;
    if (at == mine.tid % WARP) continue;
    switch (own.kind) {
      case ADD: folded += value; break;
      case MIN: folded = std::min(folded, value); break;
      case MAX: folded = std::max(folded, value); break;
      case AND: folded &= value; break;
      case OR: folded |= value; break;
      case XOR: folded ^= value; break;
      case MIN_SIGNED: folded = uint32_t(std::min(int32_t(folded), int32_t(value))); break;
      case MAX_SIGNED: folded = uint32_t(std::max(int32_t(folded), int32_t(value))); break;
    }
  }
  switch (own.kind) {
    case ANY: folded = given != 0; break;
    case ALL: folded = given == members; break;
    case BALLOT: folded = given; break;
    case MATCH_ANY: folded = same; break;
    case MATCH_ALL: folded = same == members ? members : 0; break;
  }
  memcpy(own.result, &folded, sizeof folded);
}

// Lets the lanes at one `__activemask()` continue when no other lane of the warp can arrive there.
static bool release_active(int first, unsigned waits) {
  unsigned members = 0;
  for (unsigned left = waits; left; left &= left - 1) {
    const Fiber& each = fibers[first + __builtin_ctz(left)];
    if (each.warp.kind != ACTIVE) continue;
    if (!members || each.warp.line == fibers[first + __builtin_ctz(members)].warp.line) members |= left & -left;
  }
  for (int at = first; at < std::min<int>(first + WARP, int(fibers.size())); at++)
    if (fibers[at].state == READY) return false;
  for (unsigned left = members; left; left &= left - 1) {
    Fiber& each = fibers[first + __builtin_ctz(left)];
    memcpy(each.warp.result, &members, sizeof members);
    each.state = READY;
  }
  progress += members != 0;
  return members != 0;
}

// Lets waiting lanes of a warp continue when all lanes of their mask have arrived.
static bool release_warp(int first) {
  const int end = std::min<int>(first + WARP, int(fibers.size()));
  unsigned waits = 0, alive = 0;
  for (int at = first; at < end; at++) {
    if (fibers[at].state == AT_WARP) waits |= 1u << (at - first);
    if (fibers[at].state != DONE) alive |= 1u << (at - first);
  }
  for (unsigned left = waits; left; left &= left - 1) {
    const WarpOperation& one = fibers[first + __builtin_ctz(left)].warp;
    if (one.kind == ACTIVE) continue;
    const unsigned wanted = (one.mask & alive) | (left & -left);
    unsigned members = 0;
    for (unsigned rest = wanted & waits; rest; rest &= rest - 1) {
      const WarpOperation& other = fibers[first + __builtin_ctz(rest)].warp;
      if (other.mask == one.mask && other.kind == one.kind && (one.kind == SYNC || other.line == one.line))
        members |= 1u << __builtin_ctz(rest);
    }
    if (members != wanted) continue;
    for (unsigned rest = members; rest; rest &= rest - 1) {
      Fiber& mine = fibers[first + __builtin_ctz(rest)];
      if (is_shuffle(one.kind)) shuffle(first, members, mine);
      else if (one.kind != SYNC) vote(first, members, mine);
    }
    if (one.kind == SYNC) order_warp(first, members);  // __syncwarp orders memory; shuffles do not
    for (unsigned rest = members; rest; rest &= rest - 1) fibers[first + __builtin_ctz(rest)].state = READY;
    progress++;
    return true;
  }
  return release_active(first, waits);
}

static void deadlock() {
  Fiber *block = nullptr, *warp = nullptr;
  for (Fiber& each : fibers) {
    if (each.state == AT_BARRIER) block = &each;
    if (each.state == AT_WARP) warp = &each;
  }
  running = warp;
  if (Report* made = report(DEADLOCK, 0, 0, warp->warp.file, warp->warp.line))
    if (block) made->other_line = block->line, made->other_thread = block->index;
  running = nullptr;
  stopped = true;
}

}  // namespace emulated
