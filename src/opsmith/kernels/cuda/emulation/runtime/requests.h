// Memory requests of warps, as on a GPU: a model without caches and without time.
//
// Lanes run one after another here. Each lane records a trail: the blocks of code that it passes and its accesses, with
// program counter and stack pointer. The trails of a warp are then replayed in step. Lanes in the deepest call continue
// first; among these, the lanes at the lowest address. Lanes at the same place continue together (S. Collange,
// "Stack-less SIMT reconvergence at low cost", 2011). So lanes that took different paths meet again where the paths
// join. Accesses that are replayed together are one request.
//
// This is an approximation. A CPU compiler generates the code; a GPU compiler may unroll, predicate, keep values in
// registers, read twice, or merge neighbouring accesses. Lanes of a GPU may also meet later than possible.
#pragma once
#include "segments.h"
#include "steps.h"

namespace emulated {

constexpr size_t TRAIL = 1024;  // maximum length of a trail before other lanes of the warp must follow
constexpr uint64_t SECTOR = 32;
constexpr int BANKS = 32;       // of 4 bytes

struct Passed {
  uint64_t place;  // stack pointer from the stack's end, and program counter: the deepest call has the smallest value
  uint64_t address;
  uint32_t size;
  Use use;
};

struct Trail {
  std::vector<Passed> passed;
  size_t next;
};

static bool counting;
static uint64_t caller_stack;  // stack pointer of the caller
static std::vector<Trail> trails;
static std::unordered_map<uint64_t, int> requests_at;  // by place, region, use and size

static void pass(uint64_t pc, uint64_t address, uint32_t size, Use use) {
  Trail& mine = trails[running->tid];
  const uint64_t place = (caller_stack - stack_of(*running)) << 32 | pc;
  // A value of other than 1, 2, 4, 8 or 16 bytes is read in equal pieces, as wide as its size allows.
  const uint32_t piece = size && (size & (size - 1) || size > 16) ? std::min(size & -size, 16u) : size;
  uint32_t done = 0;
  do {
    mine.passed.push_back({place, address + done, piece, use});
    if (mine.passed.size() % TRAIL == 0) progress++, leave();
  } while ((done += piece) < size);
}

// Accesses that lanes of a warp make together, to one tensor or to shared memory.
struct Request {
  int count;
  uint64_t addresses[WARP];
  uint8_t lanes[WARP];
};

struct Cost { uint64_t parts, fewest; };

// Sectors that some accesses touch, and as many as their bytes would fill (CUDA C++ Best Practices Guide, "Coalesced
// access to global memory").
static Cost sectors_of(uint64_t* addresses, int count, uint32_t size) {
  std::sort(addresses, addresses + count);
  uint64_t parts = 0, bytes = 0, next = 0, end = 0;  // next: sector behind the last
  for (int at = 0; at < count; at++) {
    const uint64_t begin = addresses[at], last = (begin + size - 1) / SECTOR;
    const uint64_t first = std::max(begin / SECTOR, next);
    if (last >= first) parts += last - first + 1, next = last + 1;
    if (begin + size > end) bytes += begin + size - std::max(begin, end), end = begin + size;
  }
  return {parts, (bytes + SECTOR - 1) / SECTOR};
}

// Updates of one address are serialised (CUDA C++ Programming Guide, "SIMT architecture"), in parallel with the next
// updates of the other addresses. The minimum is reached if lanes update neighbouring elements.
static Cost sectors_of_atomics(uint64_t* addresses, int count, uint32_t size) {
  const uint64_t fewest = (count * size + SECTOR - 1) / SECTOR;
  uint64_t parts = 0;
  while (count) {
    uint64_t turn[WARP];
    int taken = 0, left = 0;
    std::sort(addresses, addresses + count);
    for (int at = 0; at < count; at++) {
      if (at && addresses[at] == turn[taken - 1]) addresses[left++] = addresses[at];
      else turn[taken++] = addresses[at];
    }
    parts += sectors_of(turn, taken, size).parts;
    count = left;
  }
  return {parts, fewest};
}

// A wavefront carries one word of each bank to all lanes that need it (CUDA C++ Programming Guide, "Shared memory"). If
// lanes use 8 bytes, half a warp is served at once; if they use 16, a quarter (G. Thomas-Collignon and P. Micikevicius,
// "Volta: architecture and performance optimization", GTC 2018). Atomics of one word are serialised.
static Cost wavefronts_of(const Request& request, uint32_t size, bool atomic) {
  const int together = size > 8 ? 8 : size > 4 ? 16 : 32;
  Cost cost{};
  for (int first = 0; first < WARP; first += together) {
    uint64_t words[WARP];
    int count = 0;
    for (int at = 0; at < request.count; at++) {
      if (request.lanes[at] < first || request.lanes[at] >= first + together) continue;
      const uint64_t word = request.addresses[at] / 4;
      for (uint32_t more = 0; more < (size + 3) / 4; more++) words[count++] = word + more;
    }
    if (!count) continue;
    std::sort(words, words + count);
    if (!atomic) count = int(std::unique(words, words + count) - words);
    uint64_t of_bank[BANKS] = {}, most = 0;
    for (int at = 0; at < count; at++) most = std::max(most, ++of_bank[words[at] % BANKS]);
    cost.parts += most, cost.fewest++;
  }
  return cost;
}

// Variables of the library that are registers on a GPU, such as threadIdx.
static bool is_register(uint64_t address) {
  for (const Index* each : {&emulated_thread, &emulated_block, &emulated_block_dim, &emulated_grid_dim})
    if (address - (uint64_t)each < sizeof(Index)) return true;
  return false;
}

static int region_of(uint64_t address) {
  if (is_shared(address)) return IN_SHARED;
  for (int which = 0; which < region_count; which++)
    if (address >= regions[which].base && address < regions[which].base + regions[which].bytes) return which;
  return address >= data_begin && address < data_end && !is_register(address) ? IN_GLOBAL_VARIABLE : NOWHERE;
}

static Requests& requests_of(uint64_t pc, int region, Use use, uint32_t size) {
  const uint64_t key = pc << 32 | uint64_t(uint16_t(region)) << 16 | uint64_t(use) << 8 | size;
  const auto found = requests_at.find(key);
  if (found != requests_at.end()) return options.requests[found->second];
  if (outcome->requests >= options.most_requests - 1) {  // the last one is for all others
    outcome->requests = options.most_requests;
    Requests& others = options.requests[options.most_requests - 1];
    others.region = NOWHERE, others.use = use;
    return others;
  }
  requests_at[key] = outcome->requests;
  Requests& made = options.requests[outcome->requests++];
  return made = {pc, region, use, int32_t(size), 0, 0, 0, 0, 0};
}

// Counts the accesses that lanes make together, separately for each tensor, use and size.
static void count_requests(uint64_t pc, int count, const Passed* const* uses, const uint8_t* lanes) {
  int regions_of[WARP];
  for (int at = 0; at < count; at++) regions_of[at] = region_of(uses[at]->address);
  for (uint32_t left = count == 32 ? ~0u : (1u << count) - 1; left;) {
    const int one = __builtin_ctz(left), region = regions_of[one];
    const uint32_t size = uses[one]->size;
    const Use use = uses[one]->use;
    Request request{};
    for (int at = one; at < count; at++) {
      const bool alike = regions_of[at] == region && uses[at]->size == size && uses[at]->use == use;
      if (!(left >> at & 1) || !alike) continue;
      left &= ~(1u << at);
      request.lanes[request.count] = lanes[at], request.addresses[request.count++] = uses[at]->address;
    }
    if (region == NOWHERE) continue;  // registers, constants of the kernel, or a fault
    Requests& all = requests_of(pc, region, use, size);
    all.count++, all.lanes += request.count;
    const Cost cost = region == IN_SHARED ? wavefronts_of(request, size, use == ATOMICS)
                      : use == ATOMICS     ? sectors_of_atomics(request.addresses, request.count, size)
                                          : sectors_of(request.addresses, request.count, size);
    all.parts += cost.parts, all.fewest += cost.fewest;
  }
}

// Replays the lanes of a warp as long as the next step of each lane is known.
static void replay(int first) {
  const int end = std::min<int>(first + WARP, int(fibers.size()));
  for (;;) {
    uint64_t least = UINT64_MAX;
    for (int at = first; at < end; at++) {
      const Trail& each = trails[at];
      if (each.next < each.passed.size()) least = std::min(least, each.passed[each.next].place);
      else if (fibers[at].state == READY) least = 0;
    }
    if (!least || least == UINT64_MAX) break;
    const Passed* uses[WARP];
    uint8_t lanes[WARP];
    int count = 0;
    for (int at = first; at < end; at++) {
      Trail& each = trails[at];
      if (each.next == each.passed.size() || each.passed[each.next].place != least) continue;
      lanes[count] = uint8_t(at - first), uses[count++] = &each.passed[each.next++];
    }
    if (uses[0]->use) count_requests(least & UINT32_MAX, count, uses, lanes);
  }
  for (int at = first; at < end; at++) {
    Trail& each = trails[at];
    each.passed.erase(each.passed.begin(), each.passed.begin() + ptrdiff_t(each.next));
    each.next = 0;
  }
}

static void replay_all() {
  for (size_t first = 0; first < fibers.size(); first += WARP) replay(int(first));
}

static void begin_counting(size_t threads) {
  counting = options.most_requests > 0;
  requests_at.clear();
  trails.assign(counting ? threads : 0, Trail{});
}

}  // namespace emulated
