// CUDA C++ for the CPU: one thread after the other. Kernels whose threads do not wait for one another, and
// that share no memory, compute here what they compute on a GPU; their parameters come as the driver gets them.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
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

using Run = void (*)(void** parameters, const unsigned* grid, const unsigned* block);

template <auto kernel, class F> struct Emulated;
template <auto kernel, class... P> struct Emulated<kernel, void (*)(P...)> {
  template <size_t... at>
  static void call(void** parameters, std::index_sequence<at...>) {
    kernel(*static_cast<std::remove_const_t<P>*>(parameters[at])...);
  }
  static void run(void** parameters, const unsigned* grid, const unsigned* block) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
      for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++)
          for (threadIdx.z = 0; threadIdx.z < block[2]; threadIdx.z++)
            for (threadIdx.y = 0; threadIdx.y < block[1]; threadIdx.y++)
              for (threadIdx.x = 0; threadIdx.x < block[0]; threadIdx.x++)
                call(parameters, std::index_sequence_for<P...>());
  }
};
template <auto kernel> constexpr Run emulate = &Emulated<kernel, decltype(kernel)>::run;
