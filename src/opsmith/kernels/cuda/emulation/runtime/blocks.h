// Blocks, one after the other: turns of the threads, and barriers.
#pragma once
#include <string.h>

#include "requests.h"
#include "warps.h"

namespace emulated {

extern "C" int emulated_barrier(const char* file, int line, int kind, int value) {
  running->file = file, running->line = line, running->kind = kind, running->value = value;
  running->state = AT_BARRIER;
  leave();
  return running->answer;
}

constexpr int IDLE_ROUNDS = 16;  // rounds of all threads in which they only spin

// All threads that have not returned wait: checks that they are at the same barrier.
static void release_block() {
  Fiber *one = nullptr, *ended = nullptr;
  int count = 0, all = 1, exited = 0;
  for (Fiber& each : fibers) {
    if (each.state == DONE) {
      if (!each.killed) exited++, ended = ended && ended->last_access > each.last_access ? ended : &each;
      continue;
    }
    if (!one) one = &each;
    count += each.value != 0, all &= each.value != 0;
    if (each.line == one->line && !strcmp(each.file, one->file)) continue;
    running = &each;
    if (Report* made = report(DIVERGENT_BARRIER, 0, 0, each.file, each.line))
      made->other_line = one->line, made->other_thread = one->index;
  }
  running = one;
  if (ended)
    if (Report* made = report(BARRIER_AFTER_EXIT, 0, 0, one->file, one->line)) {
      made->size = exited, made->other_thread = ended->index, made->other_pc = ended->last_access;
      made->other_write = ended->barriers >> (one->line % 64) & 1;
    }
  running = nullptr;
  for (Fiber& each : fibers) {
    if (each.state == DONE) continue;
    each.answer = each.kind == 1 ? count : each.kind == 2 ? all : count > 0;
    each.state = READY, each.barriers |= uint64_t(1) << (each.line % 64);
  }
  order_block();
  progress++;
}

// A number below `count` (G. Steele et al., "Fast splittable pseudorandom number generators", 2014).
static uint32_t draw(uint64_t& state, size_t count) {
  uint64_t mixed = state += 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
  return uint32_t((mixed >> 32) * count >> 32);
}

static void run_block(uint64_t& random, std::vector<int>& turn, bool last) {
  begin_block();
  block_end = outcome->steps + options.block_steps;
  watched = nullptr;
  for (Fiber& each : fibers) {
    prepare(each);
    each.state = READY, each.killed = false, each.clock = 1, each.fence_clock = 0, each.barriers = 0;
    each.steps = each.last_access = each.read_address = each.spin_address = 0, each.spins = 0;
  }
  int idle = 0;
  for (int round = 0; !stopped; round++) {
    const uint64_t before = progress;
    const bool backward = options.order == 1 || (options.order == 2 && round % 2);
    if (options.order == 3)
      for (size_t left = turn.size(); left > 1; left--) std::swap(turn[left - 1], turn[draw(random, left)]);
    for (size_t at = 0; at < turn.size() && !stopped; at++) {
      Fiber& next = fibers[turn[backward ? turn.size() - 1 - at : at]];
      if (next.state != READY) continue;
      running = &next;
      emulated_thread = next.index;
      enter(next);
      running = nullptr;
      settle_atomic();
      progress += next.state == DONE;
    }
    if (counting) replay_all();
    bool released = false, waits = false, in_warp = false;
    for (size_t first = 0; first < fibers.size(); first += WARP) released |= release_warp(int(first));
    Fiber* ready = nullptr;
    for (Fiber& each : fibers) {
      waits |= each.state == AT_BARRIER, in_warp |= each.state == AT_WARP;
      if (each.state == READY) ready = &each;
    }
    idle = progress == before ? idle + 1 : 0;
    if (idle > IDLE_ROUNDS && ready) {
      running = ready;
      report(last ? ENDLESS : WAITS_FOR_BLOCK, ready->last_access);
      running = nullptr;
      stopped = true;
    }
    if (released || ready) continue;
    if (in_warp) return deadlock();
    if (!waits) return;
    release_block();
  }
}

}  // namespace emulated
