// Runs the threads of a block as fibers, and checks every access of theirs to memory.
//
// A kernel is compiled with -fsanitize=thread, alignment and others, but no library of a sanitizer is linked: what
// the compiler calls is defined here. This file is compiled without them.
#include <link.h>
#include <signal.h>
#include <string.h>

#include "reports.h"

using namespace emulated;

extern "C" {
Index emulated_thread, emulated_block, emulated_block_dim, emulated_grid_dim;
extern const Entry emulated_entries[];
extern __thread unsigned char emulated_dynamic[];  // dynamic shared memory, behind all else: see compiler.py
}

static void (*body)(void**);
static void** parameters;
static std::vector<Cell> shared_cells, global_cells;
static std::vector<std::vector<Cell>> region_cells;
static uint64_t tls_begin, tls_end, dynamic_begin, dynamic_end, image_begin, image_end, data_begin, data_end;
static uint64_t block_end;  // steps at which this block is endless
static uint64_t progress;  // rises where a thread does what another may wait for

constexpr int ACTIVE = 18;        // the kind of `__activemask()`
constexpr uint32_t SPINS = 1024;  // at one address, until another thread goes on
constexpr int IDLE_ROUNDS = 16;   // rounds of all threads in which they only spin

[[noreturn]] static void end_thread() {
  running->killed = true;
  running->state = DONE;
  leave();
  __builtin_unreachable();
}

static void run_thread() {
  body(parameters);
  running->state = DONE;
  leave();
  __builtin_unreachable();
}

[[noreturn]] static void too_long(Kind kind, uint64_t pc) {
  report(kind, pc);
  stopped = true;
  end_thread();
}

static void step(uint64_t pc) {
  if (++running->steps > options.thread_steps) too_long(ENDLESS, pc);
  if (++outcome->steps > block_end) too_long(outcome->steps > options.steps ? TOO_LONG : ENDLESS, pc);
}

// A thread looks again at what another one may change.
static void spin(uint64_t address, uint64_t pc) {
  if (running->spin_address != address) running->spin_address = address, running->spins = 0;
  running->last_access = pc;
  if (++running->spins % SPINS == 0) leave();
}

// ---- Memory.

static void access_shared(uint64_t address, int size, bool write, bool atomic, uint64_t pc) {
  const uint64_t end = address + size, base = address >= dynamic_begin ? dynamic_begin : tls_begin;
  if (end > dynamic_begin && end > dynamic_end) {
    if (Report* made = report(SHARED_OUT_OF_BOUNDS, pc)) place(made, address, size, write, IN_SHARED, dynamic_begin);
    end_thread();
  }
  bool unwritten = false;
  for (uint64_t at = address - tls_begin; at < end - tls_begin; at++) {
    Cell& cell = shared_cells[at];
    unwritten |= (!write || atomic) && (!cell.write.tid || cell.write.epoch < block_begin);
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
    unwritten |= (!write || atomic) && !region.initialized && !cell.write.tid;
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

static void access(uint64_t address, int size, bool write, bool atomic, uint64_t pc) {
  if (!running) return;
  const uint64_t end = address + size, stack = stack_of(*running);
  if (address >= stack && end <= stack + STACK) return;
  outcome->accesses++;
  step(pc);
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

static bool is_shared(uint64_t address) { return address >= tls_begin && address < tls_end; }

// A volatile access to global memory is how threads signal one another; in shared memory it orders nothing.
static void volatile_access(void* at, int size, bool write, uint64_t pc) {
  if (!running) return;
  const uint64_t address = (uint64_t)at;
  if (!write) spin(address, pc);
  const bool signal = !is_shared(address) && fences;
  if (!signal) return access(address, size, write, false, pc);
  if (write) progress++;
  access(address, size, true, true, pc);
  order_atomic(address);
}

// ---- What the compiler calls.

#define PC code(__builtin_return_address(0))
extern "C" {
void __sanitizer_cov_trace_pc() {
  if (running) step(PC);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define ACCESS(n)                                                                                     \
  void __tsan_read##n(void* at) { access((uint64_t)at, n, false, false, PC); }                        \
  void __tsan_write##n(void* at) { access((uint64_t)at, n, true, false, PC); }                        \
  void __tsan_unaligned_read##n(void* at) { access((uint64_t)at, n, false, false, PC); }              \
  void __tsan_unaligned_write##n(void* at) { access((uint64_t)at, n, true, false, PC); }              \
  void __tsan_volatile_read##n(void* at) { volatile_access(at, n, false, PC); }                       \
  void __tsan_volatile_write##n(void* at) { volatile_access(at, n, true, PC); }                       \
  void __tsan_unaligned_volatile_read##n(void* at) { volatile_access(at, n, false, PC); }             \
  void __tsan_unaligned_volatile_write##n(void* at) { volatile_access(at, n, true, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void* at, size_t size) { access((uint64_t)at, int(size), false, false, PC); }
void __tsan_write_range(void* at, size_t size) { access((uint64_t)at, int(size), true, false, PC); }
static void* copy(void* to, const void* from, size_t size, uint64_t pc) {
  if (size) access((uint64_t)from, int(size), false, false, pc), access((uint64_t)to, int(size), true, false, pc);
  return memmove(to, from, size);
}
static void* fill(void* to, int value, size_t size, uint64_t pc) {
  if (size) access((uint64_t)to, int(size), true, false, pc);
  return memset(to, value, size);
}
void* emulated_memcpy(void* to, const void* from, size_t size) { return copy(to, from, size, PC); }
void* emulated_memmove(void* to, const void* from, size_t size) { return copy(to, from, size, PC); }
void* emulated_memset(void* to, int value, size_t size) { return fill(to, value, size, PC); }
void* __tsan_memcpy(void* to, const void* from, size_t size) { return copy(to, from, size, PC); }
void* __tsan_memmove(void* to, const void* from, size_t size) { return copy(to, from, size, PC); }
void* __tsan_memset(void* to, int value, size_t size) { return fill(to, value, size, PC); }

void emulated_atomic(const void* at, int size, void* return_address) {
  const uint64_t address = (uint64_t)at, pc = code(return_address);
  if (address % size) {
    if (Report* made = report(MISALIGNED, pc)) made->size = size, made->write = 1;
    end_thread();
  }
  if (running->read_address == address) guesses.insert(running->read_pc);
  spin(address, pc);
  access(address, size, true, true, pc);
  order_atomic(address);
}
void emulated_spin(void* return_address) { spin(0, code(return_address)); }
void emulated_fence() {
  fences = true;
  running->fence_clock = running->clock++, running->fence_epoch = epoch;
}

struct Source { const char* file; uint32_t line, column; };
struct TypeName { uint16_t kind, info; char name[]; };
struct Mismatch { Source at; TypeName* type; uint8_t alignment, check; };
void __ubsan_handle_type_mismatch_v1(Mismatch* data, void* at) {
  if (!running) return;
  const uint64_t address = (uint64_t)at;
  if (Report* made = report(MISALIGNED, PC, 0, data->at.file, int(data->at.line))) {
    made->text = data->type->name, made->size = 1 << data->alignment;
    for (int which = 0; which < region_count; which++)
      if (address - regions[which].base < regions[which].bytes)
        made->region = which, made->offset = int64_t(address - regions[which].base);
    if (is_shared(address)) made->region = IN_SHARED, made->offset = int64_t(address - dynamic_begin);
  }
  end_thread();  // as on a GPU; and vectors of the CPU would fault
}
static void undefined(Kind kind, const Source& at, const char* text, uint64_t pc) {
  if (!running) return;
  if (Report* made = report(kind, pc, 0, at.file, int(at.line))) made->text = text;
}
void __ubsan_handle_out_of_bounds(Source* at, void*) { undefined(ARRAY_INDEX, *at, "", PC); }
void __ubsan_handle_shift_out_of_bounds(Source* at, void*, void*) {
  undefined(UNDEFINED, *at, "it shifts by a number of bits that is negative, or as large as the number's own", PC);
}
void __ubsan_handle_divrem_overflow(Source* at, void*, void*) {
  undefined(UNDEFINED, *at, "it divides a whole number by zero", PC);
  if (running) end_thread();
}
void __ubsan_handle_missing_return(Source* at) {
  undefined(UNDEFINED, *at, "a function that returns a value ends without one", PC);
  if (running) end_thread();
}
void __ubsan_handle_builtin_unreachable(Source* at) { __ubsan_handle_missing_return(at); }
void emulated_trap(const char* text, const char* file, int line) {
  if (Report* made = report(TRAP, 0, 0, file, line)) made->text = text;
  end_thread();
}

// ---- Barriers and warps.

int emulated_barrier(const char* file, int line, int kind, int value) {
  running->file = file, running->line = line, running->kind = kind, running->value = value;
  running->state = AT_BARRIER;
  leave();
  return running->answer;
}
void emulated_warp(int kind, unsigned mask, const void* value, int size, int argument, int width, void* result,
                   const char* file, int line) {
  if (size > 16) emulated_trap("a value of more than 16 bytes, which no shuffle takes", file, line);
  WarpOperation& warp = running->warp;
  warp = {kind, size, argument, width, line, mask, {}, {}, file};
  if (value) memcpy(warp.value, value, size);
  if (!(mask >> (running->tid % WARP) & 1))
    if (Report* made = report(NOT_IN_MASK, 0, 0, file, line)) made->size = running->tid % WARP;
  running->state = AT_WARP;
  leave();
  if (result) memcpy(result, running->warp.result, kind >= 5 ? 4 : size);
}
}  // extern "C"

// A shuffle, as in the PTX manual (shfl.sync).
static void shuffle(int first, unsigned members, Fiber& mine) {
  WarpOperation& own = mine.warp;
  const int lane = mine.tid % WARP, width = own.width, segment = lane & ~(width - 1), last = segment + width - 1;
  int from = lane;
  bool moves = true;
  if (own.kind == 1) from = segment + (own.argument & (width - 1));
  if (own.kind == 2) from = lane - own.argument, moves = from >= segment;
  if (own.kind == 3) from = lane + own.argument, moves = from <= last;
  if (own.kind == 4) from = lane ^ own.argument, moves = from <= last;
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
      case 10: folded += value; break;
      case 11: folded = std::min(folded, value); break;
      case 12: folded = std::max(folded, value); break;
      case 13: folded &= value; break;
      case 14: folded |= value; break;
      case 15: folded ^= value; break;
      case 16: folded = uint32_t(std::min(int32_t(folded), int32_t(value))); break;
      case 17: folded = uint32_t(std::max(int32_t(folded), int32_t(value))); break;
    }
  }
  switch (own.kind) {
    case 5: folded = given != 0; break;
    case 6: folded = given == members; break;
    case 7: folded = given; break;
    case 8: folded = same; break;
    case 9: folded = same == members ? members : 0; break;
  }
  memcpy(own.result, &folded, sizeof folded);
}

// Lets the lanes at one `__activemask()` go on, once no other lane of the warp can come to it.
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

// Lets the lanes of a warp go on that wait for one another, where all of a mask are there.
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
      if (other.mask == one.mask && other.kind == one.kind && (!one.kind || other.line == one.line))
        members |= 1u << __builtin_ctz(rest);
    }
    if (members != wanted) continue;
    for (unsigned rest = members; rest; rest &= rest - 1) {
      Fiber& mine = fibers[first + __builtin_ctz(rest)];
      if (one.kind >= 1 && one.kind <= 4) shuffle(first, members, mine);
      else if (one.kind) vote(first, members, mine);
    }
    if (!one.kind) order_warp(first, members);  // __syncwarp orders memory; shuffles do not
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

// All threads that have not returned wait: were they at the same barrier?
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
  block_end = std::min(outcome->steps + options.block_steps, options.steps);
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
      progress += next.state == DONE;
    }
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

// ---- The launch.

static int find_segments(dl_phdr_info* info, size_t, void*) {
  const uint64_t here = (uint64_t)&find_segments;
  const auto begins = [&](int at) { return uint64_t(info->dlpi_addr + info->dlpi_phdr[at].p_vaddr); };
  const auto ends = [&](int at) { return begins(at) + info->dlpi_phdr[at].p_memsz; };
  bool ours = false;
  for (int at = 0; at < info->dlpi_phnum; at++)
    ours |= info->dlpi_phdr[at].p_type == PT_LOAD && here >= begins(at) && here < ends(at);
  if (!ours) return 0;
  library = info->dlpi_addr;
  image_begin = UINT64_MAX, image_end = 0;
  for (int at = 0; at < info->dlpi_phnum; at++) {
    const auto& part = info->dlpi_phdr[at];
    if (part.p_type == PT_LOAD) {
      image_begin = std::min(image_begin, begins(at)), image_end = std::max(image_end, ends(at));
      if (part.p_flags & PF_W) data_begin = begins(at), data_end = ends(at);
    }
    if (part.p_type == PT_TLS) tls_begin = (uint64_t)info->dlpi_tls_data, tls_end = tls_begin + part.p_memsz;
  }
  return 1;
}

static void on_fault(int, siginfo_t* info, void* context) {
  const uint64_t address = (uint64_t)info->si_addr;
  uint64_t pc = 0;
#if defined(__x86_64__)
  const auto& registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  pc = registers[REG_RIP];
  const uint64_t top = registers[REG_RSP];
  const bool on_stack = running && top >= stack_of(*running) + GUARD && top < stack_of(*running) + STACK;
  if (on_stack && !(pc >= image_begin && pc < image_end)) pc = *(uint64_t*)top;  // a call to nowhere
#elif defined(__aarch64__)
  pc = ((ucontext_t*)context)->uc_mcontext.pc;
#endif
  if (running && outcome) {
    const bool overrun = address >= stack_of(*running) && address < stack_of(*running) + GUARD;
    const bool inside = pc >= image_begin && pc < image_end;
    report(overrun ? STACK_OVERFLOW : CRASH, inside ? pc - library : running->last_access);
  }
  _exit(3);
}

static void handle_faults() {
  static void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const stack_t other = {stack, 0, STACK};
  sigaltstack(&other, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &action, nullptr);
}

static void report_unwritten() {
  for (int which = 0; which < region_count && !stopped; which++) {
    const Region& region = regions[which];
    if (!region.writable || region.initialized) continue;
    int64_t unwritten = 0, first = -1;
    for (uint64_t item = 0; item < region.bytes / region.item; item++)
      if ((!region.mask || region.mask[item]) && !region_cells[which][item].write.tid && !unwritten++) first = item;
    if (!unwritten) continue;
    if (Report* made = report(NOT_WRITTEN, 0, 0, nullptr, which + 1))
      made->region = which, made->offset = first * region.item, made->count = int(unwritten);
  }
}

extern "C" __attribute__((visibility("default"))) int emulated_run(
    int entry, void** given, const unsigned* grid, const unsigned* block, unsigned shared, Region* tensors, int count,
    const Options* wanted, Report* room, Outcome* told) {
  const size_t threads = size_t(block[0]) * block[1] * block[2];
  options = *wanted, reports = room, outcome = told, *told = {}, stopped = false, fences = false;
  racing_reads.clear(), guesses.clear(), released.clear();
  regions = tensors, region_count = count, parameters = given, body = emulated_entries[entry].call;
  thread_body = run_thread;
  grid_size = emulated_grid_dim = {grid[0], grid[1], grid[2]};
  block_size = emulated_block_dim = {block[0], block[1], block[2]};
  if (!reserve_stacks(threads)) return 1;
  dynamic_begin = (uint64_t)&emulated_dynamic[0], dynamic_end = dynamic_begin + shared;
  dl_iterate_phdr(find_segments, nullptr);
  if (options.handle_faults) handle_faults();
  outcome->started = 1;
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
    memset((void*)tls_begin, 0xff, dynamic_end - tls_begin);  // nan, where nothing is written
    run_block(random, turn, at + 1 == blocks);
  }
  running = nullptr;
  report_unwritten();
  drop_guesses();
  outcome->finished = 1;
  return 0;
}
