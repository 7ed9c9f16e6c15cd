// Element types and sizes, strides of layouts, copies between layouts.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace opsmith {

// ONNX's number of an element type, by torch's; 0 where a kernel has no such type.
inline int32_t element_type(int32_t dtype) {
  constexpr int32_t types[] = {2, 3, 5, 6, 7, 10, 1, 11, 0, 0, 0, 9, 0, 0, 0, 16};
  return dtype >= 0 && dtype < int32_t(sizeof types / sizeof *types) ? types[dtype] : 0;
}

inline int64_t element_size(int32_t dtype) {
  constexpr int64_t sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 0, 0, 0, 1, 0, 0, 0, 2};
  return sizes[dtype];
}

inline std::vector<int64_t> contiguous_strides(const int64_t* sizes, int64_t dim) {
  std::vector<int64_t> strides(static_cast<size_t>(dim));
  int64_t step = 1;
  for (int64_t at = dim - 1; at >= 0; at--) {
    strides[size_t(at)] = step;
    step *= std::max<int64_t>(sizes[at], 1);
  }
  return strides;
}

inline std::vector<int64_t> channels_last_strides(const int64_t* sizes, int64_t dim) {
  std::vector<int64_t> strides(static_cast<size_t>(dim));
  int64_t step = 1;
  strides[1] = step;
  step *= std::max<int64_t>(sizes[1], 1);
  for (int64_t at = dim - 1; at >= 2; at--) {
    strides[size_t(at)] = step;
    step *= std::max<int64_t>(sizes[at], 1);
  }
  strides[0] = step;
  return strides;
}

// Copies elements between two tensors of the same sizes with different strides.
inline void copy(const char* from, const int64_t* from_strides, char* into, const int64_t* into_strides,
                 const int64_t* sizes, int64_t dim, int64_t size) {
  if (dim == 0) {
    std::memcpy(into, from, size_t(size));
    return;
  }
  for (int64_t at = 0; at < *sizes; at++)
    copy(from + at * *from_strides * size, from_strides + 1, into + at * *into_strides * size,
         into_strides + 1, sizes + 1, dim - 1, size);
}
}  // namespace opsmith
