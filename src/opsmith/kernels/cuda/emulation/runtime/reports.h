// Reports of faults, one for each pair of places, in memory from Python.
#pragma once
#include <unordered_set>

#include "happens_before.h"

namespace emulated {

static Options options;
static Outcome* outcome;
static Region* regions;
static int region_count;
static Report* reports;
static std::vector<uint64_t> racing_reads;    // for each report, the plain read that races with an atomic, or 0
static std::unordered_set<uint64_t> guesses;  // plain reads that only prepare an atomic at the same address
static bool stopped;
static uint64_t library;                      // its address in memory
static Index block_index;
static Index block_size, grid_size;

static uint64_t code(const void* pc) { return pc ? (uint64_t)pc - 1 - library : 0; }

static Index index_of(uint32_t at, const Index& size) { return {at % size.x, at / size.x % size.y, at / size.x / size.y}; }

// A new report; null if there is a report for the same places, which is counted up instead.
static Report* report(Kind kind, uint64_t pc, uint64_t other_pc = 0, const char* file = nullptr, int line = 0) {
  for (int at = 0; at < outcome->reports; at++) {
    Report& each = reports[at];
    if (each.kind == kind && each.pc == pc && each.other_pc == other_pc && each.line == line && each.file == file) {
      each.count++;
      return nullptr;
    }
  }
  if (outcome->reports == options.most) return stopped = true, nullptr;
  racing_reads.push_back(0);
  Report& made = reports[outcome->reports++];
  made = Report{};
  made.kind = kind, made.region = NOWHERE, made.count = 1;
  made.pc = pc, made.other_pc = other_pc, made.file = file, made.line = line;
  made.block = block_index;
  if (running) made.thread = running->index;
  return &made;
}

static void place(Report* made, uint64_t address, int size, bool write, int region, uint64_t base) {
  made->size = size, made->write = write, made->region = region, made->offset = int64_t(address - base);
}

static void report_race(const Conflict& conflict, bool atomic, uint64_t address, int size, bool write, int region,
                        uint64_t base, uint64_t pc) {
  Report* made = report(RACE, pc, conflict.other.pc);
  if (!made) return;
  place(made, address, size, write, region, base);
  made->other_write = conflict.other_write;
  made->other_thread = index_of(thread_of(conflict.other), block_size);
  made->other_block = index_of(block_of(conflict.other.epoch), grid_size);
  const bool other_atomic = conflict.other_write && conflict.other.tid & ATOMIC;
  racing_reads.back() = atomic && !conflict.other_write ? conflict.other.pc : !write && other_atomic ? pc : 0;
}

// The loop of a compare-and-swap begins with a plain read, whose value need not be the latest.
static void drop_guesses() {
  int kept = 0;
  for (int at = 0; at < outcome->reports; at++)
    if (!racing_reads[at] || !guesses.count(racing_reads[at])) reports[kept++] = reports[at];
  outcome->reports = kept;
}

}  // namespace emulated
