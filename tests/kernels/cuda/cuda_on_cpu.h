// CUDA C++ for the CPU: one block after the other, and of its threads one after the other. Where threads wait for
// one another each has a stack of its own, and runs until it waits. Parameters come as the driver gets them.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static  // blocks run one after the other
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))

using std::int16_t, std::int32_t, std::int64_t, std::int8_t;
using std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

struct Index3 { unsigned x, y, z; };
static Index3 threadIdx, blockIdx, blockDim, gridDim;

static inline float __uint_as_float(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static inline uint32_t __float_as_uint(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }
static inline uint16_t emulated_half(float value) { _Float16 half = value; uint16_t bits; std::memcpy(&bits, &half, 2); return bits; }
static inline float emulated_float(uint16_t bits) { _Float16 half; std::memcpy(&half, &bits, 2); return half; }

using std::max, std::min;

// ---- Shared memory: what no thread has written is nan, and nothing may be written behind its end.

constexpr size_t MOST_SHARED = 227 * 1024, BEHIND = 4096;
constexpr unsigned char UNWRITTEN = 0xff;
namespace opsmith { alignas(16) unsigned char opsmith_shared[MOST_SHARED + BEHIND]; }

static void forget_shared(size_t size) { std::memset(opsmith::opsmith_shared, UNWRITTEN, size + BEHIND); }
static bool is_kept(size_t size) {
  const unsigned char* end = opsmith::opsmith_shared + size;
  return std::all_of(end, end + BEHIND, [](unsigned char each) { return each == UNWRITTEN; });
}

// ---- Threads that wait for one another.

enum { OK = 0, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719 };  // as the driver has them

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Index3 index;
  int waits_at;  // the line of the barrier at which it waits; -1: it has returned
};
static Fiber* running;
static ucontext_t scheduler;

static void wait_for_block(int line) {
  running->waits_at = line;
  swapcontext(&running->context, &scheduler);
}
#define __syncthreads() wait_for_block(__LINE__)

struct Body {  // what a thread runs
  void (*call)(void** parameters);
  void** parameters;
};
static Body body;
static void run_thread() {
  body.call(body.parameters);
  running->waits_at = -1;
}

// Runs a block's threads from barrier to barrier, forwards and then backwards, so that what needs a barrier and
// has none meets both orders. Every thread has to come to the same barrier: elsewhere a GPU hangs, or does anything.
static int run_together(std::vector<Fiber>& fibers) {
  for (Fiber& each : fibers) {
    getcontext(&each.context);
    each.stack.resize(64 * 1024);
    each.context.uc_stack.ss_sp = each.stack.data();
    each.context.uc_stack.ss_size = each.stack.size();
    each.context.uc_link = &scheduler;
    makecontext(&each.context, run_thread, 0);
  }
  for (bool backwards = false;; backwards = !backwards) {
    for (size_t at = 0; at < fibers.size(); at++) {
      running = &fibers[backwards ? fibers.size() - 1 - at : at];
      threadIdx = running->index;
      swapcontext(&scheduler, &running->context);
    }
    const int line = fibers[0].waits_at;
    for (const Fiber& each : fibers)
      if (each.waits_at != line) return LAUNCH_FAILED;
    if (line < 0) return OK;
  }
}

using Run = int (*)(void** parameters, const unsigned* grid, const unsigned* block, unsigned shared);

// `together`: whether threads wait for one another. Without that they need no stacks, which is faster.
template <auto kernel, bool together, class F> struct Emulated;
template <auto kernel, bool together, class... P> struct Emulated<kernel, together, void (*)(P...)> {
  template <size_t... at>
  static void call(void** parameters, std::index_sequence<at...>) {
    kernel(*static_cast<std::remove_const_t<P>*>(parameters[at])...);
  }
  static void call(void** parameters) { call(parameters, std::index_sequence_for<P...>()); }

  template <class Each>
  static void each_thread(Each each) {
    for (threadIdx.z = 0; threadIdx.z < blockDim.z; threadIdx.z++)
      for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) each();
  }

  static int run(void** parameters, const unsigned* grid, const unsigned* block, unsigned shared) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    body = {&call, parameters};
    std::vector<Fiber> fibers(together ? blockDim.x * blockDim.y * blockDim.z : 0);
    size_t count = 0;
    if (together) each_thread([&] { fibers[count++].index = threadIdx; });
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
      for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++) {
          forget_shared(shared);
          if (together) {
            if (int status = run_together(fibers)) return status;
          } else {
            each_thread([&] { call(parameters); });
          }
          if (!is_kept(shared)) return ILLEGAL_ADDRESS;
        }
    return OK;
  }
};
template <auto kernel, bool together>
constexpr Run emulate = &Emulated<kernel, together, decltype(kernel)>::run;
