// Data that the runtime, a compiled kernel and Python share. Python has the same structures in launch.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emulated {

// Kinds of reports, in the order of `Kind` in launch.py.
enum Kind : int32_t {
  NONE,
  OUT_OF_BOUNDS,         // beyond a tensor
  BETWEEN_ELEMENTS,      // memory between the elements of a strided tensor
  INPUT_WRITTEN,
  NO_MEMORY,             // far from every tensor
  OTHER_STACK,           // a local variable of another thread
  SHARED_OUT_OF_BOUNDS,  // beyond dynamic shared memory
  ARRAY_INDEX,           // beyond an array whose size the compiler knows
  UNINITIALIZED_SHARED,
  UNINITIALIZED_RESULT,
  RACE,
  MISALIGNED,
  DIVERGENT_BARRIER,     // threads of a block wait at different barriers
  BARRIER_AFTER_EXIT,    // threads wait at a barrier, and others have ended
  DEADLOCK,              // lanes wait for lanes of their mask that never arrive
  ABSENT_LANE,           // a shuffle from a lane that does not take part
  NOT_IN_MASK,           // a lane that is not in its own mask
  NOT_WRITTEN,           // elements of a result
  UNDEFINED,             // undefined behaviour in C++
  TRAP,                  // `assert` or `__trap()`
  ENDLESS,
  TOO_LONG,              // more steps than a launch may take, without an endless thread
  WAITS_FOR_BLOCK,       // a thread waits in a loop for a value that only a later block can write
  CRASH,                 // a memory fault that no check predicted
  STACK_OVERFLOW,
  UNORDERED_SUM,         // floating-point numbers that threads add to one element, in no fixed order
  BEYOND_SHARED_VARIABLE,  // beyond a shared variable whose size the source states
  OUT_OF_MEMORY,         // the CPU has none for the launch
};

// Operations of a warp.
enum WarpKind : int32_t {
  SYNC, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, ANY, ALL, BALLOT, MATCH_ANY, MATCH_ALL,
  ADD, MIN, MAX, AND, OR, XOR, MIN_SIGNED, MAX_SIGNED, ACTIVE
};

enum : int32_t { IN_SHARED = -1, NOWHERE = -2, IN_GLOBAL_VARIABLE = -3 };  // values of `region`

struct Index { uint32_t x, y, z; };

// A tensor of the launch.
struct Region {
  uint64_t base, bytes;  // from its first element to the end of its last
  const uint8_t* mask;   // a byte for each item: 1 if it is an element; null if all items are elements
  uint8_t* written;      // 1 for each item that an earlier launch, or this one at its end, has written; may be null
  int32_t item, writable, initialized;
  int32_t complete;      // 1 if unwritten elements are reported
};

struct Report {
  int32_t kind, write, size, region;
  int64_t offset;         // bytes from the region's begin
  uint64_t pc, other_pc;  // offsets in the library; 0 if `line` has the location
  Index block, thread, other_block, other_thread;
  int32_t other_write, other_line, line, count;
  const char *file, *text;
};

// Uses of memory.
enum Use : int32_t { NO_USE, READS, WRITES, ATOMICS };

// Requests of warps from one place in the code to one tensor, or to shared memory.
struct Requests {
  uint64_t pc;            // offset in the library; 0 for all further places when the table is full
  int32_t region, use, size, unused;     // size: bytes of a lane
  uint64_t count, lanes, parts, fewest;  // parts: sectors of global memory, or wavefronts of shared memory
};

struct Options {
  int32_t order;        // 0 forward, 1 backward, 2 alternating, 3 random
  int32_t most;         // capacity for reports
  uint64_t seed;
  uint64_t thread_steps, block_steps, steps;  // limits: of a thread, of a block, and of the launch
  int32_t handle_faults;
  int32_t most_requests;  // capacity for requests; 0: none are counted
  int32_t first, unused;  // first: 1 if the kernel's variables are reset to their initial values
  Requests* requests;
};

struct Outcome {
  int32_t finished, reports, requests, unused;
  uint64_t steps;
};

struct Entry { void (*call)(void** parameters); };

}  // namespace emulated
