// Forward for a group, or for the rest of a group after whole vectors of channels, with so few channels that
// a vector of them would be mostly empty. Here the lanes are consecutive pixels of a row, and each channel
// has its own plane.
#pragma once
#include "involution.h"

namespace involution {

template <class A>
constexpr int few = count<A> / 4;  // channels

// Planes of the image, surrounded by zeros, and planes of sums, whose rows are padded to whole vectors.
template <class A>
struct FewLayout {
  Axis down, across;
  int64_t pixel_row, pixel_plane, sum_row, sum_plane;  // numbers from one to the next

  // For this number of rows of the result.
  FewLayout(const Axis& down, const Axis& across, int64_t rows) : down(down), across(across) {
    pixel_row = std::max(across.extent(across.result), across.size + across.padding);
    pixel_plane = down.extent(rows) * pixel_row;
    sum_row = (across.result + count<A> - 1) / count<A> * count<A>;
    sum_plane = rows * sum_row;
  }
  // Whole vectors of numbers; loads of pixels may reach up to one vector beyond the last.
  int64_t scratch() const {
    return (few<A> * (pixel_plane + sum_plane) + 2 * count<A> - 1) / count<A> * count<A>;
  }
};

// The weights of a row of taps, for a row of pixels.
template <class T>
struct FewTaps {
  const T* weights;
  int64_t pitch;  // numbers from tap to tap
  int64_t ahead;  // numbers to the weights that are used next
  const T* last;  // of all weights: up to it a load may reach beyond the row, into lanes that are dropped
};

// Adds to V vectors of sums, in each of C channels, a row of taps.
template <int C, int V, class T, class A>
void add_to_few(const FewLayout<A>& layout, A* sums, const A* pixels, FewTaps<T> it) {
  constexpr int L = count<A>;
  Vector<A> sum[C][V];
  each<C>([&](auto c) __attribute__((always_inline)) {
    each<V>([&](auto k) __attribute__((always_inline)) {
      std::memcpy(&sum[c][k], sums + c * layout.sum_plane + k * L, sizeof sum[c][k]);
    });
  });
  for (int64_t v = 0; v < layout.across.kernel; v++) {
    each<V>([&](auto k) __attribute__((always_inline)) {
      const T* tap = it.weights + k * L;
      __builtin_prefetch(tap + it.ahead);
      const int64_t readable = it.last - tap + 1;
      const Vector<A> taps = readable >= L ? lanes::load(tap) : lanes::load_some(tap, readable);
      each<C>([&](auto c) __attribute__((always_inline)) {
        Vector<A> pixel;
        std::memcpy(&pixel, pixels + c * layout.pixel_plane + k * L, sizeof pixel);
        sum[c][k] += taps * pixel;
      });
    });
    it.weights += it.pitch;
    pixels += layout.across.dilation;
  }
  each<C>([&](auto c) __attribute__((always_inline)) {
    each<V>([&](auto k) __attribute__((always_inline)) {
      std::memcpy(sums + c * layout.sum_plane + k * L, &sum[c][k], sizeof sum[c][k]);
    });
  });
}

constexpr int64_t SOON = 1024;  // bytes of a tap between a weight and the weight that is prefetched

// Rows of the result for `image`. Windows are one pixel apart in a row, and rows of weights and of the result
// are contiguous.
template <class T, class A>
void forward_of_few(const FewLayout<A>& layout, const Planes<const T>& image, const View<const T, 6>& weight,
                    const Share& share, A* scratch, const Planes<T>& result) {
  constexpr int L = count<A>;
  const Axis &down = layout.down, &across = layout.across;
  A *sums = scratch, *pixels = scratch + image.channels * layout.sum_plane;
  const int64_t rows = share.last - share.first;

  const int64_t top = down.window({share.first, share.last}).first;  // of the image: row 0 of pixels
  for (int64_t channel = 0; channel < image.channels; channel++)
    for (int64_t row = 0; row < down.extent(rows); row++) {
      A *to = pixels + channel * layout.pixel_plane + row * layout.pixel_row, *end = to + layout.pixel_row;
      const bool inside = top + row >= 0 && top + row < down.size;
      A* behind = inside ? to + across.padding + across.size : to;
      if (inside) {
        std::fill(to, to + across.padding, A(0));
        widen(image.at(channel, top + row, 0), image.column_stride, across.size, to + across.padding,
              image.row_stride);
      }
      std::fill(behind, end, A(0));
    }
  std::fill(sums, pixels, A(0));

  FewTaps<T> taps;
  taps.pitch = weight.stride(3), taps.last = weight.data;
  for (int at = 0; at < 6; at++) taps.last += (weight.size(at) - 1) * weight.stride(at);
  const T* weights = weight.data + share.batch * weight.stride(0) + share.group * weight.stride(1) +
                     share.first * weight.stride(4);
  const int64_t soon = std::max<int64_t>(1, SOON / (across.result * int64_t(sizeof(T))));  // rows
  each<few<A>>([&](auto c) {
    constexpr int C = c + 1;
    if (image.channels != C) return;
    // One row of taps after the other, so that few streams of weights are read at a time. After the last row
    // comes the first row of the next row of taps.
    for (int64_t u = 0; u < down.kernel; u++)
      for (int64_t row = 0; row < rows; row++) {
        A* sum = sums + row * layout.sum_row;
        const A* pixel = pixels + (row * down.stride + u * down.dilation) * layout.pixel_row;
        taps.ahead =
            soon * weight.stride(4) + (row + soon < rows ? 0 : weight.stride(2) - rows * weight.stride(4));
        for (int64_t at = 0; at < across.result; at += 2 * L) {
          taps.weights = weights + u * weight.stride(2) + row * weight.stride(4) + at;
          if (across.result - at > L) add_to_few<C, 2>(layout, sum + at, pixel + at, taps);
          else add_to_few<C, 1>(layout, sum + at, pixel + at, taps);
        }
      }
  });

  for (int64_t channel = 0; channel < image.channels; channel++)
    for (int64_t row = 0; row < rows; row++) {
      const A* sum = sums + channel * layout.sum_plane + row * layout.sum_row;
      T* to = result.at(channel, share.first + row, 0);
      for (int64_t at = 0; at < across.result; at += L) {
        Vector<A> value;
        std::memcpy(&value, sum + at, sizeof value);
        const int64_t left = across.result - at;
        if (left >= L) lanes::store(to + at, value);
        else lanes::store_some(to + at, value, left);
      }
    }
}

}  // namespace involution
