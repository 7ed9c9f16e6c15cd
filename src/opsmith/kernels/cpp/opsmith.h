// Types of a C++ kernel's parameters: views of tensors, lists, numbers and strings. Nothing of torch.
//
//   #include "opsmith.h"   (done for you)
//   template <class T>
//   void scaled(Contiguous<const T> x, double by, Contiguous<T> result) {
//     for (int64_t i = 0; i < x.numel(); i++) result[i] = x[i] * T(by);
//   }
//
// A function's parameters are the operator's arguments, in their order, and then its results. The type of a
// parameter states the accepted dtype, number of dimensions (any if no number is given) and layout.
// A view without `const` is written: a result, or an argument that the operator writes into.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

namespace opsmith {

// ---- Numbers that are stored in 16 bits and computed in float.

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  BFloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    bool is_nan = (wide & 0x7fffffffu) > 0x7f800000u;  // rounding would turn some nan into infinity
    bits = is_nan ? uint16_t((wide >> 16) | 0x40) : uint16_t((wide + 0x7fffu + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

struct Half {
  uint16_t bits;
  Half() = default;
  Half(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    uint32_t sign = (wide >> 16) & 0x8000u, size = wide & 0x7fffffffu;
    if (size > 0x7f800000u) {
      bits = uint16_t(sign | 0x7e00u);
    } else if (size >= 0x477ff000u) {  // 65520 and more round to infinity
      bits = uint16_t(sign | 0x7c00u);
    } else if (size < 0x38800000u) {  // below 2**-14: the float adder rounds to the right multiple of 2**-24
      float magnitude, shifted;
      std::memcpy(&magnitude, &size, 4);
      shifted = magnitude + 0.5f;
      uint32_t rounded;
      std::memcpy(&rounded, &shifted, 4);
      bits = uint16_t(sign | (rounded - 0x3f000000u));
    } else {
      uint32_t odd = (size >> 13) & 1;
      bits = uint16_t(sign | ((size - 0x38000000u + 0xfffu + odd) >> 13));
    }
  }
  operator float() const {
    uint32_t sign = uint32_t(bits & 0x8000u) << 16, rest = uint32_t(bits & 0x7fffu) << 13, wide;
    float value;
    if (rest >= (0x7c00u << 13)) {
      wide = rest + 0x70000000u;  // infinity and nan: the largest exponent of either
    } else if (rest >= (0x400u << 13)) {
      wide = rest + 0x38000000u;
    } else {
      float scaled = float(bits & 0x3ffu) * 0x1p-24f;
      std::memcpy(&wide, &scaled, 4);
    }
    wide |= sign;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

template <class T> using of_16_bits = std::enable_if_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, T&>;
template <class T> of_16_bits<T> operator+=(T& to, float by) { return to = float(to) + by; }
template <class T> of_16_bits<T> operator-=(T& to, float by) { return to = float(to) - by; }
template <class T> of_16_bits<T> operator*=(T& to, float by) { return to = float(to) * by; }
template <class T> of_16_bits<T> operator/=(T& to, float by) { return to = float(to) / by; }

// ---- dtypes, by torch's numbers.

template <class T> struct dtype_of;
template <> struct dtype_of<uint8_t> { static constexpr int32_t value = 0; };
template <> struct dtype_of<int8_t> { static constexpr int32_t value = 1; };
template <> struct dtype_of<int16_t> { static constexpr int32_t value = 2; };
template <> struct dtype_of<int32_t> { static constexpr int32_t value = 3; };
template <> struct dtype_of<int64_t> { static constexpr int32_t value = 4; };
template <> struct dtype_of<Half> { static constexpr int32_t value = 5; };
template <> struct dtype_of<float> { static constexpr int32_t value = 6; };
template <> struct dtype_of<double> { static constexpr int32_t value = 7; };
template <> struct dtype_of<bool> { static constexpr int32_t value = 11; };
template <> struct dtype_of<BFloat16> { static constexpr int32_t value = 15; };

// ---- Values from the dispatcher, which runtime.cpp fills in.

struct RawTensor {
  void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dim;
};

struct RawList {
  const void* data;
  int64_t size;
};

struct Value {
  bool given;  // false: the argument is None
  union {
    RawTensor tensor;
    RawList list;  // of int64_t, double, bool, char or RawTensor
    int64_t integer;
    double number;
    bool flag;
  };
};

// ---- Views.

constexpr int any_dim = -1;

// A tensor with any strides. `x(i, j)` is an element; `x.data`, `x.sizes` and `x.strides` are plain pointers.
template <class T, int N = any_dim>
struct View {
  T* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dim;

  int64_t size(int64_t at) const { return sizes[at < 0 ? at + dim : at]; }
  int64_t stride(int64_t at) const { return strides[at < 0 ? at + dim : at]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t at = 0; at < dim; at++) count *= sizes[at];
    return count;
  }
  template <class... Index>
  T& operator()(Index... index) const {
    static_assert(N == any_dim || N == int(sizeof...(Index)), "as many indices as the view has dimensions");
    int64_t at = 0, offset = 0;
    ((offset += int64_t(index) * strides[at++]), ...);
    return data[offset];
  }
#ifdef OPSMITH_INDEX_TYPES  // a compiler names the lines of indices of 32 bits, by its warnings
  template <class Index, int = 1 / int(sizeof(Index) == 4)>
  [[deprecated("opsmith: 32 bits")]] T& operator()(Index index) const { return data[int64_t(index) * strides[0]]; }
#endif
};

// A tensor whose elements are contiguous in memory, in row-major order. `x[i]` is element i in this order.
template <class T, int N = any_dim>
struct Contiguous : View<T, N> {
  T& operator[](int64_t at) const { return this->data[at]; }
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

template <class T>
struct List {
  const T* data;
  int64_t size;
  const T& operator[](int64_t at) const { return data[at]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
};

// ---- Errors: an exception of a kernel becomes a Python exception.

struct Error : std::exception {
  char text[1000];
  const char* what() const noexcept override { return text; }
};

#define OPSMITH_CHECK(condition, ...)                             \
  do {                                                            \
    if (__builtin_expect(!(condition), 0)) {                      \
      ::opsmith::Error error_;                                    \
      std::snprintf(error_.text, sizeof error_.text, __VA_ARGS__); \
      throw error_;                                               \
    }                                                             \
  } while (0)

// ---- Properties of a parameter's type, as data for the runtime and Python.

enum ParameterType : int32_t { TENSOR, INTEGER, NUMBER, FLAG, STRING, TENSORS, INTEGERS, NUMBERS, FLAGS };
enum Layout : int32_t { ANY = 0, CONTIGUOUS = 1, CHANNELS_LAST = 2 };

struct Parameter {
  int32_t type, optional, written, dtype, dim, layout;
};

template <class P> struct ParameterTraits {
  static_assert(!sizeof(P), "a kernel takes views, std::optional of them, int64_t, double, bool, "
                            "std::string_view and List<int64_t>, List<double>, List<bool>");
};

template <template <class, int> class V, class T, int N, Layout layout>
struct ViewTraits {
  using Element = std::remove_const_t<T>;
  static constexpr Parameter parameter{TENSOR, 0, !std::is_const_v<T>, dtype_of<Element>::value, N, layout};
  static V<T, N> get(const Value& value) {
    V<T, N> view;
    view.data = static_cast<T*>(value.tensor.data);
    view.sizes = value.tensor.sizes;
    view.strides = value.tensor.strides;
    view.dim = value.tensor.dim;
    return view;
  }
};
template <class T, int N> struct ParameterTraits<View<T, N>> : ViewTraits<View, T, N, ANY> {};
template <class T, int N> struct ParameterTraits<Contiguous<T, N>> : ViewTraits<Contiguous, T, N, CONTIGUOUS> {};
template <class T, int N> struct ParameterTraits<ChannelsLast<T, N>> : ViewTraits<ChannelsLast, T, N, CHANNELS_LAST> {};

template <> struct ParameterTraits<int64_t> {
  static constexpr Parameter parameter{INTEGER, 0, 0, -1, -1, 0};
  static int64_t get(const Value& value) { return value.integer; }
};
template <> struct ParameterTraits<double> {
  static constexpr Parameter parameter{NUMBER, 0, 0, -1, -1, 0};
  static double get(const Value& value) { return value.number; }
};
template <> struct ParameterTraits<bool> {
  static constexpr Parameter parameter{FLAG, 0, 0, -1, -1, 0};
  static bool get(const Value& value) { return value.flag; }
};
template <> struct ParameterTraits<std::string_view> {
  static constexpr Parameter parameter{STRING, 0, 0, -1, -1, 0};
  static std::string_view get(const Value& value) {
    return {static_cast<const char*>(value.list.data), size_t(value.list.size)};
  }
};
template <class T, ParameterType type> struct ListTraits {
  static constexpr Parameter parameter{type, 0, 0, -1, -1, 0};
  static List<T> get(const Value& value) { return {static_cast<const T*>(value.list.data), value.list.size}; }
};
// A view has the members of RawTensor, so that a list of RawTensor can be read as a list of views.
template <template <class, int> class V, class T, int N> struct ParameterTraits<List<V<T, N>>> {
  static_assert(sizeof(V<T, N>) == sizeof(RawTensor), "a view has the members of RawTensor");
  static constexpr Parameter parameter = [] {
    Parameter traits = ParameterTraits<V<T, N>>::parameter;
    traits.type = TENSORS;
    return traits;
  }();
  static List<V<T, N>> get(const Value& value) {
    return {static_cast<const V<T, N>*>(value.list.data), value.list.size};
  }
};
template <> struct ParameterTraits<List<int64_t>> : ListTraits<int64_t, INTEGERS> {};
template <> struct ParameterTraits<List<double>> : ListTraits<double, NUMBERS> {};
template <> struct ParameterTraits<List<bool>> : ListTraits<bool, FLAGS> {};

template <class P> struct ParameterTraits<std::optional<P>> {
  static constexpr Parameter parameter = [] {
    Parameter traits = ParameterTraits<P>::parameter;
    traits.optional = 1;
    return traits;
  }();
  static std::optional<P> get(const Value& value) {
    return value.given ? std::optional<P>(ParameterTraits<P>::get(value)) : std::nullopt;
  }
};

// ---- Sizes of results: a function `sizes` of the operator's arguments returns one Shape for each result.

constexpr int64_t most_dims = 64;  // the same limit as in torch

struct Shape {
  int64_t dim = 0;
  int64_t sizes[most_dims];

  Shape() = default;
  Shape(std::initializer_list<int64_t> given) {
    for (int64_t size : given) push(size);
  }
  template <class T, int N>
  explicit Shape(const View<T, N>& view) {
    for (int64_t at = 0; at < view.dim; at++) push(view.sizes[at]);
  }
  void push(int64_t size) {
    OPSMITH_CHECK(dim < most_dims, "a result has more than %d dimensions", int(most_dims));
    sizes[dim++] = size;
  }
};

enum SizesStatus : int32_t { KNOWN, UNKNOWN, THREW };  // of computing sizes; UNKNOWN: not computable for these arguments

// ---- One function, and the table of all functions.

struct Candidate {
  const Parameter* parameters;
  int32_t count;
  int32_t sized;  // number of results whose sizes the author's `sizes` returns; -1: there is no such function
  // Runs the kernel. Returns true if it threw; then the text is in `error`.
  bool (*run)(const Value* values, char* error, size_t room);
  // Computes the sizes of all results; null if the author's text does not compute them.
  SizesStatus (*sizes)(const Value* values, Shape* shapes, char* error, size_t room);
};

// True if a body throws; then the text is in `error`.
template <class Body>
bool throws(Body body, const char* unknown, char* error, size_t room) {
  try {
    body();
    return false;
  } catch (const std::exception& thrown) {
    std::snprintf(error, room, "%s", thrown.what());
  } catch (...) {
    std::snprintf(error, room, "%s threw something that is no std::exception", unknown);
  }
  return true;
}

// Number of results whose sizes a function `sizes` returns.
template <class R> constexpr size_t shape_count = 1;
template <size_t N> constexpr size_t shape_count<std::array<Shape, N>> = N;

// A kernel, or its function `sizes`.
template <auto function, class F = decltype(function)> struct Function;
template <auto function, class R, class... P>
struct Function<function, R (*)(P...)> {
  static constexpr Parameter parameters[sizeof...(P) + 1] = {ParameterTraits<std::decay_t<P>>::parameter..., {}};
  static constexpr int32_t count = sizeof...(P), shapes = int32_t(shape_count<R>);

  template <size_t... at>
  static R call(const Value* values, std::index_sequence<at...>) {
    return function(ParameterTraits<std::decay_t<P>>::get(values[at])...);
  }
  static R call(const Value* values) { return call(values, std::index_sequence_for<P...>()); }
  static bool run(const Value* values, char* error, size_t room) {
    return throws([&] { call(values); }, "it", error, room);
  }
  static SizesStatus compute(const Value* values, Shape* made, char* error, size_t room) {
    const auto put = [&] {
      if constexpr (std::is_same_v<R, Shape>) *made = call(values);
      else for (const Shape& each : call(values)) *made++ = each;
    };
    return throws(put, "`sizes`", error, room) ? THREW : KNOWN;
  }
};

// True if a function `sizes` takes the kernel's arguments, and returns as many sizes as there are results.
template <class... P> struct TypeList {};
template <class A, class B> struct StartsWith : std::false_type {};
template <class... Q> struct StartsWith<TypeList<>, TypeList<Q...>> : std::true_type {};
template <class H, class... P, class... Q>
struct StartsWith<TypeList<H, P...>, TypeList<H, Q...>> : StartsWith<TypeList<P...>, TypeList<Q...>> {};
template <class R, class... P, class... Q>
constexpr bool sizes_match(R (*)(P...), void (*)(Q...)) {
  const int32_t written[] = {ParameterTraits<std::decay_t<Q>>::parameter.written..., 0};
  for (size_t at = sizeof...(P); at < sizeof...(Q); at++)
    if (!written[at]) return false;
  return StartsWith<TypeList<std::decay_t<P>...>, TypeList<std::decay_t<Q>...>>::value &&
         sizeof...(P) + shape_count<R> == sizeof...(Q);
}

template <auto function, auto sizes = nullptr>
constexpr Candidate candidate() {
  using Kernel = Function<function>;
  Candidate made{Kernel::parameters, Kernel::count, -1, &Kernel::run, nullptr};
  if constexpr (!std::is_null_pointer_v<decltype(sizes)>) {
    static_assert(sizes_match(sizes, function),
                  "`sizes` takes what the kernel takes, without its results, and returns Shape, or "
                  "std::array<Shape, N> for N results");
    made.sized = Function<sizes>::shapes, made.sizes = &Function<sizes>::compute;
  }
  return made;
}

// Exports of a kernel's library.
struct Exported {
  int64_t version;
  int32_t count;
  const Candidate* candidates;
};

constexpr int64_t version = 6;

}  // namespace opsmith

using opsmith::BFloat16;
using opsmith::ChannelsLast;
using opsmith::Contiguous;
using opsmith::Half;
using opsmith::List;
using opsmith::Shape;
using opsmith::View;
