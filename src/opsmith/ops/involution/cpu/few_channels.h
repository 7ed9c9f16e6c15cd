// Involution of groups of so few channels that vectors of channels would be mostly empty: here the lanes are
// pixels of a row that follow one another, and each channel has a plane of its own.
#pragma once
#include "involution.h"

namespace involution {

template <class A>
constexpr int few = count<A> / 4;  // channels

// Planes of the image with zeros all around, and of sums, whose rows end with the vector that they end in.
template <class A>
struct FewPlanes {
  Axis down, across;
  int64_t pixel_row, pixel_plane, sum_row, sum_plane;  // numbers from one to the next

  // For so many rows of the result.
  FewPlanes(const Axis& down, const Axis& across, int64_t rows) : down(down), across(across) {
    pixel_row = std::max(across.extent(), across.size + across.padding);
    pixel_plane = window(rows) * pixel_row;
    sum_row = (across.result + count<A> - 1) / count<A> * count<A>;
    sum_plane = rows * sum_row;
  }
  // Rows of the image for so many of the result.
  int64_t window(int64_t rows) const {
    return (rows - 1) * down.stride + (down.kernel - 1) * down.dilation + 1;
  }
  // Whole vectors of numbers; loads of pixels may reach as far as one of them beyond the last.
  int64_t scratch() const {
    return (few<A> * (pixel_plane + sum_plane) + 2 * count<A> - 1) / count<A> * count<A>;
  }
};

// What a row of taps adds to the sums of a row.
template <class T>
struct FewTaps {
  const T* weights;
  int64_t step;   // numbers from tap to tap
  int64_t ahead;  // numbers to the weights that are soon used
  const T* last;  // of all weights: so far they can be read
};

// Adds to V vectors of sums, in each of C channels, a row of taps. `left` pixels are left in the row.
template <int C, int V, class T, class A>
void add_to_few(const FewPlanes<A>& planes, A* sums, const A* pixels, FewTaps<T> it, int64_t left) {
  constexpr int L = count<A>;
  Vector<A> sum[C][V];
  each<C>([&](auto c) __attribute__((always_inline)) {
    each<V>([&](auto k) __attribute__((always_inline)) {
      std::memcpy(&sum[c][k], sums + c * planes.sum_plane + k * L, sizeof sum[c][k]);
    });
  });
  for (int64_t v = 0; v < planes.across.kernel; v++) {
    each<V>([&](auto k) __attribute__((always_inline)) {
      const T* tap = it.weights + k * L;
      __builtin_prefetch(tap + it.ahead);
      const Vector<A> taps =
          tap + (L - 1) <= it.last ? lanes::load(tap) : lanes::load_some(tap, left - k * L);
      each<C>([&](auto c) __attribute__((always_inline)) {
        Vector<A> pixel;
        std::memcpy(&pixel, pixels + c * planes.pixel_plane + k * L, sizeof pixel);
        sum[c][k] += taps * pixel;
      });
    });
    it.weights += it.step;
    pixels += planes.across.dilation;
  }
  each<C>([&](auto c) __attribute__((always_inline)) {
    each<V>([&](auto k) __attribute__((always_inline)) {
      std::memcpy(sums + c * planes.sum_plane + k * L, &sum[c][k], sizeof sum[c][k]);
    });
  });
}

constexpr int64_t SOON = 1024;  // bytes of a tap between a weight and the one that is fetched meanwhile

// Rows of the result for `image`, with a step of 1 from pixel to pixel and weights that lie together in a
// row.
template <class T, class A>
void forward_of_few(const FewPlanes<A>& planes, const Planes<const T>& image, const View<const T, 6>& weight,
                    const Share& share, A* scratch, const Planes<T>& result) {
  constexpr int L = count<A>;
  const Axis &down = planes.down, &across = planes.across;
  A *sums = scratch, *pixels = scratch + image.channels * planes.sum_plane;
  const int64_t rows = share.last - share.first;

  const int64_t top = share.first * down.stride - down.padding;  // of the image: row 0 of pixels
  for (int64_t channel = 0; channel < image.channels; channel++)
    for (int64_t row = 0; row < planes.window(rows); row++) {
      A *to = pixels + channel * planes.pixel_plane + row * planes.pixel_row, *end = to + planes.pixel_row;
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
  taps.step = weight.stride(3), taps.last = weight.data;
  for (int at = 0; at < 6; at++) taps.last += (weight.size(at) - 1) * weight.stride(at);
  const T* weights = weight.data + share.batch * weight.stride(0) + share.group * weight.stride(1) +
                     share.first * weight.stride(4);
  const int64_t soon = std::max<int64_t>(1, SOON / (across.result * int64_t(sizeof(T))));  // rows
  each<few<A>>([&](auto c) {
    constexpr int C = c + 1;
    if (image.channels != C) return;
    for (int64_t u = 0; u < down.kernel; u++)
      for (int64_t row = 0; row < rows; row++) {
        A* sum = sums + row * planes.sum_row;
        const A* pixel = pixels + (row * down.stride + u * down.dilation) * planes.pixel_row;
        taps.ahead =
            soon * weight.stride(4) + (row + soon < rows ? 0 : weight.stride(2) - rows * weight.stride(4));
        for (int64_t at = 0; at < across.result; at += 2 * L) {
          taps.weights = weights + u * weight.stride(2) + row * weight.stride(4) + at;
          const int64_t left = across.result - at;
          if (left > L) add_to_few<C, 2>(planes, sum + at, pixel + at, taps, left);
          else add_to_few<C, 1>(planes, sum + at, pixel + at, taps, left);
        }
      }
  });

  for (int64_t channel = 0; channel < image.channels; channel++)
    for (int64_t row = 0; row < rows; row++) {
      const A* sum = sums + channel * planes.sum_plane + row * planes.sum_row;
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
