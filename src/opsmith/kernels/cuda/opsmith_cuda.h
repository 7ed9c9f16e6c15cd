// Types of a CUDA kernel's parameters: views of tensors, lists and numbers, all passed by value. This file uses
// neither torch nor CUDA's headers. NVRTC compiles it, and so does a CPU compiler, after emulation/device.h.
//
//   #include "opsmith_cuda.h"   (done for you)
//   template <class T>
//   __global__ void scaled(Contiguous<const T> x, double by, Contiguous<T> result) {
//     OPSMITH_EACH(i, result.numel()) result[i] = x[i] * T(by);
//   }
//
// A function's parameters are the operator's arguments, in their order, and then its results. The type of a
// parameter states the accepted dtype, number of dimensions (any if no number is given) and layout.
#pragma once

#ifdef __CUDACC_RTC__  // NVRTC has no headers of C
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#ifndef INFINITY
#define INFINITY (__builtin_bit_cast(float, 0x7f800000))
#endif
#ifndef NAN
#define NAN (__builtin_bit_cast(float, 0x7fffffff))
#endif
#endif

namespace opsmith {

// ---- Numbers that are stored in 16 bits and computed in float.

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  __device__ BFloat16(float value) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    uint32_t wide = __float_as_uint(value);
    bool is_nan = (wide & 0x7fffffffu) > 0x7f800000u;  // rounding would turn some nan into infinity
    bits = is_nan ? uint16_t(0x7fff) : uint16_t((wide + 0x7fffu + ((wide >> 16) & 1)) >> 16);
#endif
  }
  __device__ operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};

struct Half {
  uint16_t bits;
  Half() = default;
#ifdef __CUDA_ARCH__
  __device__ Half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  __device__ operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
#else  // on the CPU
  Half(float value) : bits(emulated_half(value)) {}
  operator float() const { return emulated_float(bits); }
#endif
};

// ---- dtypes, by torch's numbers.

template <class T> struct dtype_of;
template <> struct dtype_of<uint8_t> { static constexpr int value = 0; };
template <> struct dtype_of<int8_t> { static constexpr int value = 1; };
template <> struct dtype_of<int16_t> { static constexpr int value = 2; };
template <> struct dtype_of<int32_t> { static constexpr int value = 3; };
template <> struct dtype_of<long> { static constexpr int value = sizeof(long) == 8 ? 4 : 3; };
template <> struct dtype_of<long long> { static constexpr int value = 4; };
template <> struct dtype_of<Half> { static constexpr int value = 5; };
template <> struct dtype_of<float> { static constexpr int value = 6; };
template <> struct dtype_of<double> { static constexpr int value = 7; };
template <> struct dtype_of<bool> { static constexpr int value = 11; };
template <> struct dtype_of<BFloat16> { static constexpr int value = 15; };

// ---- Views.

constexpr int any_dim = -1;
constexpr int version = 1;  // of `Parameter` and of the layout of parameters; checked for built kernels
constexpr int max_dim = 8;  // of a view without a fixed number of dimensions

// A tensor with any strides. `x(i, j)` is an element; `x.data` is a plain pointer.
template <class T, int N = any_dim>
struct View {
  static constexpr int room = N == any_dim ? max_dim : N > 0 ? N : 1;
  T* data;
  int64_t elements;
  int64_t dim;
  int64_t sizes[room];
  int64_t strides[room];

  __device__ int64_t size(int at) const { return sizes[at < 0 ? at + int(dim) : at]; }
  __device__ int64_t stride(int at) const { return strides[at < 0 ? at + int(dim) : at]; }
  __device__ int64_t numel() const { return elements; }
  template <class... Index>
  __device__ __forceinline__ T& operator()(Index... index) const {
    static_assert(N == any_dim || N == int(sizeof...(Index)), "as many indices as the view has dimensions");
    int at = 0;
    int64_t offset = 0;
    ((offset += int64_t(index) * strides[at++]), ...);
    return data[offset];
  }
#ifdef OPSMITH_INDEX_TYPES  // NVRTC names the lines of indices of 32 bits, by its warnings
  template <class Index, int = 1 / int(sizeof(Index) == 4)>
  [[deprecated("opsmith: 32 bits")]] T& operator()(Index at) const { return data[int64_t(at) * strides[0]]; }
#endif
};

// A tensor whose elements are contiguous in memory, in row-major order. `x[i]` is element i in this order.
template <class T, int N = any_dim>
struct Contiguous : View<T, N> {
  __device__ __forceinline__ T& operator[](int64_t at) const { return this->data[at]; }
#ifdef OPSMITH_INDEX_TYPES
  template <class Index, int = 1 / int(sizeof(Index) == 4)>
  [[deprecated("opsmith: 32 bits")]] T& operator[](Index at) const { return this->data[int64_t(at)]; }
#endif
};

// A tensor of 4 or 5 dimensions whose channels (dimension 1) are contiguous in memory: `torch.channels_last`.
template <class T, int N = 4>
struct ChannelsLast : View<T, N> {
  static_assert(N == 4 || N == 5, "channels-last tensors have 4 or 5 dimensions");
};

// List of at most N values. The kernel does not take longer lists.
template <class T, int N = 8>
struct List {
  int64_t size;
  T data[N];
  __device__ __forceinline__ const T& operator[](int64_t at) const { return data[at]; }
  __device__ const T* begin() const { return data; }
  __device__ const T* end() const { return data + size; }
};

// A value that may be None.
template <class T>
struct Optional {
  bool given;
  T value;
  __device__ explicit operator bool() const { return given; }
  __device__ const T& operator*() const { return value; }
  __device__ const T* operator->() const { return &value; }
};

// ---- Dynamic shared memory, of the size in `shared=`.

template <class T>
__device__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char opsmith_shared[];
  return reinterpret_cast<T*>(opsmith_shared);
}

// ---- Properties of a parameter's type, as data for Python.

enum ParameterType : int { TENSOR, INTEGER, NUMBER, FLAG, STRING, TENSORS, INTEGERS, NUMBERS, FLAGS };
enum Layout : int { ANY = 0, CONTIGUOUS = 1, CHANNELS_LAST = 2 };

struct Parameter {
  int type, optional, written, dtype, dim, layout;
  int room;  // capacity of a list
  int item;  // bytes of a number
  int size, alignment;
};

template <class T> struct without_const { using type = T; static constexpr bool written = true; };
template <class T> struct without_const<const T> { using type = T; static constexpr bool written = false; };

template <class P> struct ParameterTraits {
  static_assert(!sizeof(P), "a kernel takes views, Optional of them, int64_t, int, double, float, bool, and "
                            "List of views, int64_t, double or bool");
};

template <class V, class T, int N, Layout layout>
struct ViewTraits {
  static constexpr Parameter parameter{
      TENSOR, 0, without_const<T>::written, dtype_of<typename without_const<T>::type>::value,
      N, layout, 0, 0, sizeof(V), alignof(V)};
};
template <class T, int N> struct ParameterTraits<View<T, N>> : ViewTraits<View<T, N>, T, N, ANY> {};
template <class T, int N> struct ParameterTraits<Contiguous<T, N>> : ViewTraits<Contiguous<T, N>, T, N, CONTIGUOUS> {};
template <class T, int N>
struct ParameterTraits<ChannelsLast<T, N>> : ViewTraits<ChannelsLast<T, N>, T, N, CHANNELS_LAST> {};

template <class P, ParameterType type> struct NumberTraits {
  static constexpr Parameter parameter{type, 0, 0, -1, -1, 0, 0, sizeof(P), sizeof(P), alignof(P)};
};
template <> struct ParameterTraits<int> : NumberTraits<int, INTEGER> {};
template <> struct ParameterTraits<long> : NumberTraits<long, INTEGER> {};
template <> struct ParameterTraits<long long> : NumberTraits<long long, INTEGER> {};
template <> struct ParameterTraits<float> : NumberTraits<float, NUMBER> {};
template <> struct ParameterTraits<double> : NumberTraits<double, NUMBER> {};
template <> struct ParameterTraits<bool> : NumberTraits<bool, FLAG> {};

template <class P, int N> struct ParameterTraits<List<P, N>> {
  static constexpr Parameter parameter = [] {
    Parameter traits = ParameterTraits<P>::parameter;
    traits.type += TENSORS;  // the types of lists follow those of items, in the same order
    traits.room = N;
    traits.size = sizeof(List<P, N>);
    traits.alignment = alignof(List<P, N>);
    return traits;
  }();
};

template <class P> struct ParameterTraits<Optional<P>> {
  static constexpr Parameter parameter = [] {
    Parameter traits = ParameterTraits<P>::parameter;
    traits.optional = 1;
    traits.size = sizeof(Optional<P>);
    traits.alignment = alignof(Optional<P>);
    return traits;
  }();
};

template <class P> struct by_value { using type = P; };
template <class P> struct by_value<const P> { using type = P; };

template <class F> struct Table;
template <class... P> struct Table<void (*)(P...)> {
  int count;
  Parameter parameters[sizeof...(P) + 1];
  constexpr Table()
      : count(sizeof...(P)), parameters{ParameterTraits<typename by_value<P>::type>::parameter..., Parameter{}} {}
};

// Number of this thread among all threads of the launch, and the number of all threads.
inline int64_t threads_of_block() { return int64_t(blockDim.x) * blockDim.y * blockDim.z; }
inline int64_t threads_of_launch() { return threads_of_block() * gridDim.x * gridDim.y * gridDim.z; }
inline int64_t thread_of_launch() {
  int64_t block = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  return block * threads_of_block() + (int64_t(threadIdx.z) * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

}  // namespace opsmith

using opsmith::BFloat16;
using opsmith::ChannelsLast;
using opsmith::Contiguous;
using opsmith::Half;
using opsmith::List;
using opsmith::Optional;
using opsmith::View;

// Loop over all numbers below `count`, distributed over all threads of the launch, for any grid and block.
#define OPSMITH_EACH(index, count)                                                                     \
  for (int64_t index = opsmith::thread_of_launch(), index##_end = (count),                             \
               index##_step = opsmith::threads_of_launch();                                            \
       index < index##_end; index += index##_step)
