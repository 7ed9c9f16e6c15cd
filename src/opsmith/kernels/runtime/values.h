// Values of a call: vectors that need no heap memory, signatures, and memory layouts of tensors.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "opsmith.h"

namespace opsmith {

// A vector whose first items are in the object itself, so that most calls need no heap memory.
template <class T, size_t N>
class Inline {
 public:
  void push(const T& item) {
    if (count_ < N) {
      first_[count_] = item;
    } else {
      if (count_ == N) more_.assign(first_, first_ + N);
      more_.push_back(item);
    }
    count_++;
  }
  T* data() { return count_ <= N ? first_ : more_.data(); }
  const T* data() const { return count_ <= N ? first_ : more_.data(); }
  size_t size() const { return count_; }
  T& operator[](size_t at) { return data()[at]; }
  const T& operator[](size_t at) const { return data()[at]; }

 private:
  T first_[N];
  std::vector<T> more_;
  size_t count_ = 0;
};

using Words = Inline<uint64_t, 48>;

struct Argument {
  int32_t type;
  bool optional;
  bool written;  // the operator writes into it
  bool free = false;  // its floating-point numbers are not part of the signature, since only the kernel reads them
  bool by_address = false;  // the signature contains whether its tensor's address is divisible by 16

  template <class From>
  void read(From& from) {
    from(type, optional, written, free, by_address);
  }
};

// Device of a tensor, by torch's number of its type.
struct Device {
  int32_t type = 0, index = 0;  // the CPU
};

using Signed = std::vector<Argument>;  // the arguments of an operator

// Contents of a call: the values of its arguments, and the dtypes and the device of its tensors.
struct CallValues {
  Inline<Value, 12> values;
  Inline<int32_t, 12> dtypes;
  Device device{};
  bool several_devices = false;
};

struct Signature {
  std::vector<uint64_t> words;
  explicit Signature(const Words& from) : words(from.data(), from.data() + from.size()) {}
};

inline uint64_t hash(const uint64_t* words, size_t count) {
  uint64_t sum = count;
  for (size_t at = 0; at < count; at++) {
    sum = (sum ^ words[at]) * 0x9e3779b97f4a7c15u;
    sum ^= sum >> 29;
  }
  return sum;
}

struct Dtype {
  const char* name;
  size_t size;  // bytes of an element
  bool is_signed = true, is_floating = false;
};

// A dtype by torch's number; kernels take no other dtypes.
inline Dtype dtype_at(int32_t dtype) {
  static constexpr Dtype all[] = {
      {"uint8", 1, false}, {"int8", 1}, {"int16", 2}, {"int32", 4}, {"int64", 8}, {"float16", 2, true, true},
      {"float32", 4, true, true}, {"float64", 8, true, true}, {"complex32", 4}, {"complex64", 8}, {"complex128", 16},
      {"bool", 1, false}, {"qint8", 1}, {"quint8", 1}, {"qint32", 4}, {"bfloat16", 2, true, true}};
  const bool known = dtype >= 0 && dtype < int32_t(std::size(all));
  return known ? all[dtype] : Dtype{nullptr, 8};
}
inline size_t item_size(int32_t dtype) { return dtype_at(dtype).size; }
inline bool is_floating(int32_t dtype) { return dtype_at(dtype).is_floating; }
inline std::string dtype_name(int32_t dtype) {
  const char* name = dtype_at(dtype).name;
  return name ? name : "dtype " + std::to_string(dtype);
}

// Bounds of a tensor's values: the smallest and the largest whole number of a dtype that is not floating point.
inline int64_t least_of(int32_t dtype) {
  return dtype_at(dtype).is_signed ? INT64_MIN >> (64 - 8 * item_size(dtype)) : 0;
}
inline int64_t most_of(int32_t dtype) {
  return dtype == dtype_of<bool>::value ? 1 : dtype == dtype_of<uint8_t>::value ? 255 : ~least_of(dtype);
}

// Bytes from the first to the last element.
inline size_t extent(int32_t dtype, int64_t dim, const int64_t* sizes, const int64_t* strides) {
  int64_t last = 0;
  for (int64_t at = 0; at < dim; at++) {
    if (sizes[at] == 0) return 0;
    last += (sizes[at] - 1) * strides[at];
  }
  return item_size(dtype) * size_t(last + 1);
}

// True if the dimensions of a tensor are nested in memory, the last one innermost, with or without gaps.
inline bool is_nested(const RawTensor& raw) {
  int64_t inner = 1;
  for (int64_t at = raw.dim - 1; at >= 0; at--) {
    if (raw.sizes[at] == 0) return true;
    if (raw.sizes[at] == 1) continue;
    if (raw.strides[at] < inner) return false;
    inner = raw.strides[at] * raw.sizes[at];
  }
  return true;
}

// Strides of a tensor without gaps, in a layout.
inline std::vector<int64_t> strides_in(int64_t dim, const int64_t* sizes, int32_t layout) {
  std::vector<int64_t> strides(static_cast<size_t>(dim));
  int64_t step = 1;
  auto put = [&](int64_t at) {
    strides[size_t(at)] = step;
    step *= std::max<int64_t>(sizes[at], 1);
  };
  const bool last = layout == CHANNELS_LAST;
  if (last) put(1);
  for (int64_t at = dim - 1; at >= (last ? 2 : 0); at--) put(at);
  if (last) put(0);
  return strides;
}

inline bool has_layout(const RawTensor& raw, int32_t layout) {
  if (layout == ANY || (layout == CONTIGUOUS && std::count(raw.sizes, raw.sizes + raw.dim, 0))) return true;
  const std::vector<int64_t> wanted = strides_in(raw.dim, raw.sizes, layout);
  for (int64_t at = 0; at < raw.dim; at++)
    if (raw.sizes[at] != 1 && raw.strides[at] != wanted[size_t(at)]) return false;
  return true;
}

inline std::string listed(const int64_t* numbers, int64_t count) {
  std::string text = "[";
  for (int64_t at = 0; at < count; at++) text += (at ? ", " : "") + std::to_string(numbers[at]);
  return text + "]";
}

// Steps of one size in bytes, and their maximum number.
struct Step {
  int64_t size, limit;
};

// True if steps, sorted from the largest, can add up to a distance.
inline bool reach(const Step* step, const Step* last, int64_t distance) {
  if (step == last) return distance == 0;
  int64_t rest = 0;
  for (const Step* other = step + 1; other != last; ++other) rest += other->size * other->limit;
  const int64_t least = distance > rest ? (distance - rest + step->size - 1) / step->size : 0;
  for (int64_t count = std::min(step->limit, distance / step->size); count >= least; --count)
    if (reach(step + 1, last, distance - count * step->size)) return true;
  return false;
}

struct Extent {
  const char *begin, *end;
  RawTensor raw;
  bool written;
  int64_t item;
};

using Steps = Inline<Step, 16>;

// True if steps can add up to a distance.
inline bool reach(Steps& steps, int64_t distance) {
  Step *first = steps.data(), *last = first;
  std::sort(first, first + steps.size(), [](const Step& a, const Step& b) { return a.size > b.size; });
  for (Step* each = first; each != first + steps.size(); ++each)
    if (last != first && last[-1].size == each->size)
      last[-1].limit += each->limit;
    else
      *last++ = *each;
  return reach(first, last, distance);
}

// True if several elements of a tensor share memory: `_meets_itself` of writes.py.
inline bool meets_itself(const RawTensor& raw) {
  if (is_nested(raw) || std::count(raw.sizes, raw.sizes + raw.dim, 0)) return false;
  for (int64_t at = 0; at < raw.dim; at++) {
    if (raw.sizes[at] == 1) continue;
    if (raw.strides[at] == 0) return true;
    // Two elements that differ by some steps in one dimension share memory if steps back in the others cancel these.
    Steps steps;
    steps.push({raw.strides[at], raw.sizes[at] - 2});
    int64_t back = -raw.strides[at];
    for (int64_t other = 0; other < raw.dim; other++) {
      if (other == at || raw.strides[other] == 0) continue;
      steps.push({raw.strides[other], 2 * (raw.sizes[other] - 1)});
      back += raw.strides[other] * (raw.sizes[other] - 1);
    }
    if (reach(steps, back)) return true;
  }
  return false;
}

// True if two tensors share elements: `shares_elements` of writes.py.
inline bool meet(const Extent& one, const Extent& other) {
  Steps steps;
  for (const Extent* each : {&one, &other}) {
    steps.push({1, each->item - 1});
    for (int64_t at = 0; at < each->raw.dim; at++)
      if (each->raw.strides[at]) steps.push({each->raw.strides[at] * each->item, each->raw.sizes[at] - 1});
  }
  return reach(steps, other.end - 1 - one.begin);
}

// True if a predicate holds for each tensor among the arguments, including those in lists. It takes the view, the
// index among all tensors, and the index of the argument.
template <class Holds>
bool every(const Signed& signature, const CallValues& arguments, Holds holds) {
  size_t tensor = 0;
  for (size_t at = 0; at < signature.size(); at++) {
    const Value& value = arguments.values[at];
    const int32_t type = signature[at].type;
    if (!value.given || (type != TENSOR && type != TENSORS)) continue;
    const RawTensor* raw = type == TENSOR ? &value.tensor : static_cast<const RawTensor*>(value.list.data);
    for (int64_t left = type == TENSOR ? 1 : value.list.size; left > 0; left--, raw++)
      if (!holds(*raw, tensor++, at)) return false;
  }
  return true;
}

// True if a written tensor shares elements with another tensor.
inline bool shares_written(const Signed& signature, const CallValues& arguments) {
  Inline<Extent, 8> extents;
  every(signature, arguments, [&](const RawTensor& raw, size_t tensor, size_t argument) {
    const int32_t dtype = arguments.dtypes[tensor];
    const size_t bytes = extent(dtype, raw.dim, raw.sizes, raw.strides);
    const char* begin = static_cast<const char*>(raw.data);
    if (bytes) extents.push({begin, begin + bytes, raw, signature[argument].written, int64_t(item_size(dtype))});
    return true;
  });
  Extent *first = extents.data(), *last = first + extents.size();
  std::sort(first, last, [](const Extent& one, const Extent& other) { return one.begin < other.begin; });
  for (Extent* one = first; one != last; ++one)
    for (Extent* other = one + 1; other != last && other->begin < one->end; ++other)
      if ((one->written || other->written) && meet(*one, *other)) return true;
  return false;
}
}  // namespace opsmith
