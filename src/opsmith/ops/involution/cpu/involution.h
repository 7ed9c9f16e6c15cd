// Shared parts of the three kernels of involution: the steps of the window, a group's pixels with its channels in
// vectors, from a tensor and back into one, its weights as they are computed with, and a thread's share.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "lanes.h"

namespace involution {
using lanes::all, lanes::Computed, lanes::count, lanes::each, lanes::Vector;

// Numbers from the first up to the last, without it.
struct Span {
  int64_t first, last;

  Span within(const Span& other) const {
    const int64_t begin = std::clamp(first, other.first, other.last);
    return {begin, std::clamp(last, begin, other.last)};
  }
};

constexpr int64_t FARTHEST = int64_t(1) << 40;  // pixels of a plane, with its padding

// The steps of the window in one dimension, and the sizes before and behind it.
struct Axis {
  int64_t size, result, kernel, stride, padding, dilation;

  int64_t padded() const { return size + 2 * padding; }
  // True if the steps and the sizes fit one another, and nothing that follows from them is beyond 64 bits.
  bool fits() const {
    if (std::min({size, result, kernel, stride, dilation}) < 1 || padding < 0) return false;
    if (size > FARTHEST || padding > FARTHEST) return false;
    if (kernel > 1 && dilation > (padded() - 1) / (kernel - 1)) return false;
    return (padded() - ((kernel - 1) * dilation + 1)) / stride + 1 == result;
  }
  // The same windows: steps are 1 where there is nothing to step to. Scratch is as large as they are.
  Axis in_least_steps() const {
    return {size, result, kernel, result == 1 ? 1 : stride, padding, kernel == 1 ? 1 : dilation};
  }
  // The pixels that so many results see, and those between.
  int64_t extent(int64_t results) const { return (results - 1) * stride + (kernel - 1) * dilation + 1; }

  // The taps of one of the results that lie in the image.
  Span taps_of(int64_t at) const {
    const int64_t begin = at * stride - padding;
    Span inside{0, kernel};
    while (inside.first < inside.last && begin + inside.first * dilation < 0) inside.first++;
    while (inside.last > inside.first && begin + (inside.last - 1) * dilation >= size) inside.last--;
    return inside;
  }
  // Which pixels these are, before the first and beyond the last as well.
  Span window(const Span& results) const {
    const int64_t first = results.first * stride - padding;
    return {first, first + extent(results.last - results.first)};
  }
  // The results, before the first and beyond the last as well, of which one of the taps lies on these pixels.
  Span reached(int64_t tap, const Span& pixels) const {
    const int64_t before = padding - tap * dilation;
    auto steps = [&](int64_t way) { return (way > 0 ? way + stride - 1 : way) / stride; };
    return {steps(pixels.first + before), steps(pixels.last + before)};
  }
};

struct Axes {
  Axis down, across;
};

// Holds the sizes to what kernels rely on, so that nothing beyond a tensor is read. Mostly the reference has
// done that, but not for sizes that `sizes` returns.
inline Axes fitted(const Axis& down, const Axis& across, int64_t channels, int64_t groups) {
  const bool shared = groups > 0 && channels > 0 && channels % groups == 0;
  OPSMITH_CHECK(shared, "the groups do not divide the channels");
  OPSMITH_CHECK(down.fits() && across.fits(), "the sizes do not fit one another");
  OPSMITH_CHECK(down.padded() <= FARTHEST / across.padded(), "the padded image has more than 2^40 pixels");
  return {down.in_least_steps(), across.in_least_steps()};
}

inline void expect_same(int64_t one, int64_t other) {
  OPSMITH_CHECK(one == other, "the tensors have different sizes: %lld and %lld", (long long)one,
                (long long)other);
}

// One image of one group: `channels` planes of `rows` by `columns`, with any strides.
template <class T>
struct Planes {
  T* data;
  int64_t channels, rows, columns, channel_stride, row_stride, column_stride;

  T* at(int64_t channel, int64_t row, int64_t column) const {
    return data + channel * channel_stride + row * row_stride + column * column_stride;
  }
  bool flat() const { return column_stride == 1 && row_stride == columns; }
};

template <class T>
Planes<T> planes(const opsmith::View<T, 4>& x, int64_t batch, int64_t first, int64_t channels) {
  T* data = x.data + batch * x.stride(0) + first * x.stride(1);
  return {data, channels, x.size(2), x.size(3), x.stride(1), x.stride(2), x.stride(3)};
}

// Pixels one after the other, each some vectors of channels: `pitch` pixels from row to row.
template <class A>
struct Pixels {
  A* data;
  int64_t pitch, step = count<A>;  // numbers from pixel to pixel

  A* at(int64_t row, int64_t column) const { return data + (row * pitch + column) * step; }
};

// Vectors of channels that blocks compute at once. With few registers two: a weight is loaded once for both.
template <class A>
constexpr int vectors_at_once = lanes::registers > 16 ? 1 : 2;
// Pixels of a row that the widest blocks compute at once, and the narrowest but those of a single one.
template <class A>
constexpr int widest = 14 / vectors_at_once<A>;
constexpr int NARROW = 7;

// Of a band, how many rows of the result are computed one after the other, with copied weights that stay in a
// cache.
template <class T>
int64_t rows_together(int64_t band, int64_t columns) {
  return std::max<int64_t>(1, std::min(band, 512 / int64_t(sizeof(T)) / columns));
}
// From tap to tap of copied weights, or of gathered results: `numbers` of each, with room for whole vectors.
template <class A>
int64_t tap_pitch_of(int64_t numbers) {
  return (numbers + 2 * count<A> - 1) / count<A> * count<A>;
}

constexpr int64_t LARGE = 8 << 20;  // bytes that caches do not hold
constexpr int SHORT = 2;  // pixels at the end of a run, that are sooner copied one by one than transposed

// Copies rows [first, last) of planes to pixels, where row `first` comes to row 0.
template <class T, class A = Computed<std::remove_const_t<T>>>
void gather(const Planes<T>& from, int64_t first, int64_t last, Pixels<A> to) {
  constexpr int L = count<A>;
  if (from.channel_stride == 1 && from.channels == L) {
    for (int64_t row = first; row < last; row++)
      for (int64_t column = 0; column < from.columns; column++) {
        Vector<A> pixel = lanes::load(from.at(0, row, column));
        std::memcpy(to.at(row - first, column), &pixel, sizeof pixel);
      }
    return;
  }
  if (from.column_stride != 1) {
    for (int64_t row = first; row < last; row++)
      for (int64_t column = 0; column < from.columns; column++)
        for (int64_t channel = 0; channel < L; channel++)
          to.at(row - first, column)[channel] =
              channel < from.channels ? A(*from.at(channel, row, column)) : A(0);
    return;
  }
  // As many rows as lie one behind the other are one long row.
  const bool flat = from.flat();
  const int64_t runs = flat ? 1 : last - first, length = flat ? (last - first) * from.columns : from.columns;
  for (int64_t run = 0; run < runs; run++) {
    A* pixel = to.at(run, 0);
    int64_t left = from.columns;  // in this row
    for (int64_t at = 0; at < length; at += L) {
      const int64_t some = std::min<int64_t>(L, length - at);
      if (some <= SHORT && from.channels == L) {
        for (int64_t p = 0; p < some; p++) {
          for (int64_t c = 0; c < L; c++) pixel[c] = A(from.at(c, first + run, 0)[at + p]);
          pixel += to.step;
          if (--left == 0) left = from.columns, pixel += (to.pitch - from.columns) * to.step;
        }
        continue;
      }
      Vector<A> square[L];
      if (some == L && from.channels == L) {
        each<L>([&](auto c) __attribute__((always_inline)) {
          square[c] = lanes::load(from.at(c, first + run, 0) + at);
        });
      } else {
        each<L>([&](auto c) __attribute__((always_inline)) {
          square[c] = Vector<A>{};
          if (c < from.channels) square[c] = lanes::load_some(from.at(c, first + run, 0) + at, some);
        });
      }
      lanes::transpose<A>(square);
      if (left >= L) {  // they all go to the same row
        each<L>([&](auto p) __attribute__((always_inline)) {
          std::memcpy(pixel + p * to.step, &square[p], sizeof square[p]);
        });
        pixel += L * to.step;
        left -= L;
        if (left == 0) left = from.columns, pixel += (to.pitch - from.columns) * to.step;
        continue;
      }
      each<L>([&](auto p) __attribute__((always_inline)) {
        if (p >= some) return;
        std::memcpy(pixel, &square[p], sizeof square[p]);
        pixel += to.step;
        if (--left == 0) left = from.columns, pixel += (to.pitch - from.columns) * to.step;
      });
    }
  }
}

// Copies pixels that are `step` numbers apart back to rows [first, last) of planes; `streamed` past the caches
// where whole lines of memory are written, and then `settle` comes after the last.
template <class T, class A = Computed<T>>
void scatter(const A* pixels, int64_t step, const Planes<T>& to, int64_t first, int64_t last, bool streamed) {
  constexpr int L = count<A>;
  if (to.column_stride != 1) {
    const bool whole = to.channel_stride == 1 && to.channels == L;
    for (int64_t row = first; row < last; row++)
      for (int64_t column = 0; column < to.columns; column++, pixels += step) {
        if (whole) {
          Vector<A> pixel;
          std::memcpy(&pixel, pixels, sizeof pixel);
          lanes::store(to.at(0, row, column), pixel);
        } else {
          for (int64_t channel = 0; channel < to.channels; channel++)
            *to.at(channel, row, column) = T(pixels[channel]);
        }
      }
    return;
  }
  const bool flat = to.flat();
  const int64_t runs = flat ? 1 : last - first, length = flat ? (last - first) * to.columns : to.columns;
  for (int64_t run = 0; run < runs; run++)
    for (int64_t at = 0; at < length; at += L) {
      const int64_t some = std::min<int64_t>(L, length - at);
      if (some <= SHORT && to.channels == L) {
        for (int64_t p = 0; p < some; p++, pixels += step)
          for (int64_t c = 0; c < L; c++) to.at(c, first + run, 0)[at + p] = T(pixels[c]);
        continue;
      }
      Vector<A> square[L];
      if (some == L && to.channels == L) {
        each<L>([&](auto p) __attribute__((always_inline)) {
          std::memcpy(&square[p], pixels + p * step, sizeof square[p]);
        });
        lanes::transpose<A>(square);
        each<L>([&](auto c) __attribute__((always_inline)) {
          T* target = to.at(c, first + run, 0) + at;
          streamed ? lanes::stream_one(target, square[c]) : lanes::store(target, square[c]);
        });
        pixels += L * step;
      } else {
        each<L>([&](auto p) __attribute__((always_inline)) {
          square[p] = Vector<A>{};
          if (p < some) std::memcpy(&square[p], pixels + p * step, sizeof square[p]);
        });
        pixels += some * step;
        lanes::transpose<A>(square);
        for (int64_t c = 0; c < to.channels; c++)
          lanes::store_some(to.at(c, first + run, 0) + at, square[c], some);
      }
    }
}

// Copies `size` numbers that are `stride` apart, as what they are computed with. What lies `ahead` numbers
// from them is fetched meanwhile: processors see for themselves what comes next in a row, but not in the next
// channel.
template <class T, class A = Computed<T>>
void widen(const T* from, int64_t stride, int64_t size, A* to, int64_t ahead) {
  constexpr int L = count<A>;
  if (stride != 1) {
    for (int64_t at = 0; at < size; at++) to[at] = A(from[at * stride]);
    return;
  }
  for (int64_t at = 0; at < size; at += L) {
    __builtin_prefetch(from + at + ahead);
    // The last may write beyond the end, as far as a vector reaches.
    const Vector<A> some = size - at >= L ? lanes::load(from + at) : lanes::load_some(from + at, size - at);
    std::memcpy(to + at, &some, sizeof some);
  }
}

// Copies weights as what they are computed with: for each row u of taps the rows [first, last) of
// `rows_of(u)`, which returns them and the row whose place is the first, and which may lie outside of them.
// Taps lie `pitch` numbers apart, and their rows one behind the other.
template <class T, class A, class RowsOf>
void widen_rows(const T* weights, const opsmith::View<const T, 6>& weight, RowsOf rows_of, int64_t ahead,
                A* to, int64_t pitch) {
  const int64_t size = weight.size(5);
  const bool flat = weight.stride(5) == 1 && weight.stride(4) == size;
  for (int64_t u = 0; u < weight.size(2); u++) {
    const auto [rows, begin] = rows_of(u);
    const int64_t at_once = flat ? rows.last - rows.first : 1;
    for (int64_t v = 0; v < weight.size(3); v++) {
      const T* from = weights + u * weight.stride(2) + v * weight.stride(3);
      A* tap = to + (u * weight.size(3) + v) * pitch;
      for (int64_t row = rows.first; row < rows.last; row += at_once)
        widen(from + row * weight.stride(4), weight.stride(5), at_once * size, tap + (row - begin) * size,
              ahead);
    }
  }
}

// A thread's share of the work: rows [first, last) of one group of one image.
struct Share {
  int64_t batch, group, first, last;
};

// Calls `work(share, scratch)` for all rows of all groups, in parallel. A share has at most `most` rows, and
// fewer where there would else be too few shares for the threads. Each thread has scratch memory of `size`
// numbers, which are zeros before its first share.
template <class A, class Work>
void in_shares(int64_t batches, int64_t groups, int64_t rows, int64_t most, int64_t size, Work work) {
  const int64_t images = batches * groups;
  if (images == 0 || rows == 0) return;
  const int64_t enough = (3 * omp_get_max_threads() + images - 1) / images;  // shares of each image
  const int64_t bands =
      std::min(rows, std::max((rows + most - 1) / most, omp_get_max_threads() > 1 ? enough : 1));
  bool failed = false;
#pragma omp parallel
  {
    std::unique_ptr<A, decltype(&std::free)> scratch(
        static_cast<A*>(std::aligned_alloc(64, (size * sizeof(A) + 127) / 64 * 64)), &std::free);
    if (!scratch) {
#pragma omp atomic write
      failed = true;
    } else {
      std::memset(static_cast<void*>(scratch.get()), 0, size * sizeof(A));
    }
#pragma omp barrier
    if (!failed) {
      // Neighbours go to one thread: their weights follow one another. Each has some turns, as they vary.
      const int64_t chunk = std::max<int64_t>(1, images * bands / (8 * omp_get_num_threads()));
#pragma omp for schedule(dynamic, chunk)
      for (int64_t at = 0; at < images * bands; at++) {
        const int64_t image = at / bands, band = at % bands;
        work(Share{image / groups, image % groups, rows * band / bands, rows * (band + 1) / bands},
             scratch.get());
      }
    }
  }
  OPSMITH_CHECK(!failed, "there is no memory for the %lld numbers that each thread needs", (long long)size);
}

}  // namespace involution
