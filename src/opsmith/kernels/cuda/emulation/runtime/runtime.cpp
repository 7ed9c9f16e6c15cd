// Runs the threads of a block as fibers, and checks all their memory accesses.
//
// A kernel is compiled with -fsanitize=thread, alignment and others, but no sanitizer library is linked. The functions
// that the compiler calls are defined in instrumentation.h. This file is compiled without sanitizers.
#include <stdio.h>

#include "blocks.h"
#include "instrumentation.h"

using namespace emulated;

extern "C" {
extern const Entry emulated_entries[];
extern __thread unsigned char emulated_dynamic[];  // dynamic shared memory, after all other variables: see compiler.py
}

static void (*body)(void**);
static void** parameters;

static void run_thread() {
  body(parameters);
  running->state = DONE;
  leave();
  __builtin_unreachable();
}

#define EMULATED_EXPORTED extern "C" __attribute__((visibility("default")))

EMULATED_EXPORTED void emulated_shared_variables(const uint32_t* extents, int count, const uint32_t* guards, int guarded) {
  shared_extents.assign(extents, extents + 2 * count);
  shared_guards.assign(guards, guards + guarded);
}

EMULATED_EXPORTED void emulated_run(
    int entry, void** given, const unsigned* grid, const unsigned* block, unsigned shared, Region* tensors, int count,
    const Options* wanted, Report* buffer, Outcome* result) {
  const size_t threads = size_t(block[0]) * block[1] * block[2];
  options = *wanted, reports = buffer, outcome = result, *result = {}, stopped = false, fences = false;
  racing_reads.clear(), racing_reads.reserve(options.most), guesses.clear(), released.clear(), sums.clear();
  regions = tensors, region_count = count, parameters = given, body = emulated_entries[entry].call;
  thread_body = run_thread;
  begin_counting(threads);
  grid_size = emulated_grid_dim = {grid[0], grid[1], grid[2]};
  block_size = emulated_block_dim = {block[0], block[1], block[2]};
  if (options.handle_faults) handle_faults();
  if (!reserve_stacks(threads)) {
    report(OUT_OF_MEMORY, 0);
    outcome->finished = 1;
    return;
  }
  dynamic_begin = (uint64_t)&emulated_dynamic[0], dynamic_end = dynamic_begin + shared;
  dl_iterate_phdr(find_segments, nullptr);
  if (options.first) reset_variables();
  shared_cells.assign(dynamic_end - tls_begin, Cell{});
  global_cells.assign(data_end - data_begin, Cell{});
  region_cells.assign(count, {});
  for (int at = 0; at < count; at++)
    if (regions[at].writable) region_cells[at].assign(regions[at].bytes / regions[at].item + 1, Cell{});
  fibers.assign(threads, Fiber{});
  lane_clocks.assign(threads * WARP, 0), acquired.assign(threads, {});
  std::vector<int> turn(threads);
  for (size_t at = 0; at < threads; at++) {
    fibers[at].tid = turn[at] = int(at);
    fibers[at].index = index_of(uint32_t(at), block_size);
  }
  uint64_t random = options.seed;
  epoch = 0, block_starts.clear();
  const uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
  for (uint64_t at = 0; at < blocks && !stopped; at++) {
    block_index = emulated_block = index_of(uint32_t(at), grid_size);
    memset((void*)tls_begin, 0xff, dynamic_end - tls_begin);  // nan, until it is written
    run_block(random, turn, at + 1 == blocks);
  }
  running = nullptr;
  report_unwritten();
  drop_guesses();
  fflush(stdout);  // the kernel's output, which the end of the process might lose
  outcome->finished = 1;
}
