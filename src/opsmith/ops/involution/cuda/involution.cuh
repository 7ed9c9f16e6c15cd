// Shared parts of the three kernels of involution: the steps of the window, and tiles of planes in shared memory.
//
// A thread computes a strip: as many pixels of one row as fit into 16 bytes, in the type of the sums. A block
// reads a tile once; outside of the image the tile has zeros. From it a thread reads, 16 bytes at a time, the
// window of a whole row of taps: strip + (K - 1) D pixels for strip * K products.
#pragma once

namespace tiled {

template <class T> struct Computing { using type = float; };
template <> struct Computing<double> { using type = double; };
template <class T> struct Computing<const T> : Computing<T> {};
template <class T> using Computed = typename Computing<T>::type;

template <class A> constexpr int strip = 16 / sizeof(A);

// Elements that are read or written at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

// The steps of the window in one dimension. If tiles are used, all sizes are far below 2^31.
struct Axis {
  int size, result, kernel, stride, padding, dilation;
};

// The vectors that a thread reads of each phase of a row: see `Layout`. SHIFT columns stand before the first
// one.
template <int K, int S, int D, int SHIFT, class A>
constexpr int window_vectors = ((SHIFT + (K - 1) * D) / S + strip<A> - 1) / strip<A> + 1;

// Blocks of 128 threads that have to fit on a multiprocessor, by the vectors that a thread holds, so that
// each thread has enough registers: 96 with 5 blocks, 168 with 3, 255 with 2. 5 blocks are used only where
// this was tried, because the compiler's additional registers are hard to predict.
template <class T, int VECTORS, bool TRIED>
constexpr int at_once = sizeof(T) > 4 || VECTORS > 15 ? 2 : TRIED ? 5 : 3;

__device__ inline int over(int number, int by) { return (number + by - 1) / by; }

// Layout of a tile in shared memory, in vectors of 16 bytes. Its columns are grouped by their phase, column %
// S: one tap uses pixels that are S apart, so these are contiguous here. `lanes` threads with different
// channels come before the next strip. The lengths of a row and of a plane let eight consecutive threads use
// all 32 banks. The same arithmetic as in tiles.py.
struct Layout {
  int line, row, plane;
};

__device__ inline Layout layout(int vectors, int phases, int rows, int step, int strips, int lanes) {
  const int apart = 8 / lanes;
  int row = vectors * phases;
  for (int pad = 0; pad < apart; pad++)
    if (((row + pad) * step - strips) % apart == 0) {
      row += pad;
      break;
    }
  const int plane = rows * row;
  return {vectors, row, lanes > 1 ? plane + (apart + 8 - plane % 8) % 8 : plane};
}

__device__ inline int thread() { return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }
__device__ inline int threads() { return blockDim.x * blockDim.y * blockDim.z; }

// The part of the result that a block computes: a piece of the channels of a group, the same tile of all of them at about the same
// time.
struct Place {
  int piece, across, down, group, batch;

  __device__ Place(int pieces, int tiles_across, int tiles_down, int groups) {
    unsigned left = blockIdx.x;
    auto digit = [&](unsigned base) {
      const unsigned before = left;
      left /= base;
      return int(before - left * base);
    };
    piece = digit(pieces), across = digit(tiles_across), down = digit(tiles_down), group = digit(groups);
    batch = left;
  }
};

// True if rows of a view can be read or written a strip at a time, from columns that are multiples of one.
template <int N, class T, int DIM>
__device__ bool in_strips(const View<T, DIM>& x) {
  if (x.strides[DIM - 1] != 1 || reinterpret_cast<uint64_t>(x.data) % (sizeof(T) * N) != 0) return false;
  int64_t all = x.sizes[DIM - 1];
#pragma unroll
  for (int at = 0; at < DIM - 1; at++) all |= x.strides[at];
  return all % N == 0;
}

// One dimension of what is copied: `count` indices, so far apart in memory and in the tile; index k stands
// for place `first + k scale` in the image, which is `limit` long.
struct Along {
  int count;
  int64_t from;
  int to, first, scale, limit;

  __device__ bool holds(int index) const { return unsigned(first + index * scale) < unsigned(limit); }
};

// Number by number, so that neither needs an address in memory.
__device__ inline Along either(bool first, Along one, Along two) {
  return {first ? one.count : two.count, first ? one.from : two.from, first ? one.to : two.to,
          first ? one.first : two.first, first ? one.scale : two.scale, first ? one.limit : two.limit};
}

// Copies all indices of three dimensions, N elements at a time, and zeros where a place is outside the image.
// Each thread has a fixed index of `low`, so that addresses only need additions.
template <int N, class T, class A, class Put>
__device__ void copy(const T* data, Along low, Along middle, Along high, A* tile, Put put) {
  constexpr int AHEAD = 4;  // number of reads that run at once
  const int wide = min(low.count, threads()), lines = threads() / wide, line = thread() / wide;
  if (line >= lines) return;
  const int middles = lines % middle.count, highs = lines / middle.count;
  const int64_t from_step = middles * middle.from + highs * high.from;
  const int64_t from_carry = high.from - middle.count * middle.from;
  const int to_step = middles * middle.to + highs * high.to, to_carry = high.to - middle.count * middle.to;
#pragma unroll 1
  for (int l = thread() - line * wide; l < low.count; l += wide) {
    const bool inside = low.holds(l);
    int m = line % middle.count, h = line / middle.count;
    const T* from = data + l * low.from + m * middle.from + h * high.from;
    int to = l * low.to + m * middle.to + h * high.to;
#pragma unroll 1
    while (h < high.count) {
      Pack<T, N> read[AHEAD];
      int place[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        place[k] = h < high.count ? to : -1;
        read[k] = Pack<T, N>{};
        if (inside && middle.holds(m) && high.holds(h)) read[k] = *reinterpret_cast<const Pack<T, N>*>(from);
        m += middles, h += highs, from += from_step, to += to_step;
        if (m >= middle.count) m -= middle.count, h++, from += from_carry, to += to_carry;
      }
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        if (place[k] >= 0) put(tile + place[k], read[k]);
    }
  }
}

// Copies `channels` planes of a group, of which `some` are there, to a tile: `rows` rows from `row` on, and
// as many columns as the layout has from `column` on. Rows and columns may be outside the image.
template <int S, class T, class A>
__device__ void stage(const View<const T, 4>& x, int64_t batch, int64_t channel, int channels, int some,
                      int row, int rows, int column, const Layout& lies, A* tile) {
  constexpr int N = strip<A>;
  const T* const data =
      x.data + batch * x.stride(0) + channel * x.stride(1) + row * x.stride(2) + column * x.stride(3);
  const int width = x.size(3), phase = lies.line * N;
  const Along over_channels{channels, x.stride(1), lies.plane * N, 0, 1, some};
  const Along over_rows{rows, x.stride(2), lies.row * N, row, 1, int(x.size(2))};
  if (N % S == 0 && column % N == 0 && in_strips<N>(x)) {
    const Along over_strips{lies.line * S, N, N / S, column, N, width};
    copy<N>(data, over_strips, over_rows, over_channels, tile, [&](A* to, const Pack<T, N>& read) {
      if constexpr (S == 1) {
        Pack<A, N> written;
#pragma unroll
        for (int p = 0; p < N; p++) written.at[p] = A(read.at[p]);
        *reinterpret_cast<Pack<A, N>*>(to) = written;
      } else {
#pragma unroll
        for (int p = 0; p < N; p++) to[p % S * phase + p / S] = A(read.at[p]);
      }
    });
    return;
  }
#pragma unroll 1
  for (int at = 0; at < S; at++) {  // phase by phase, and first along what lies one after the other
    const Along over_columns{phase, S * x.stride(3), 1, column + at, S, width};
    const bool by_channel = x.stride(1) == 1 && x.stride(3) != 1;
    copy<1>(data + at * x.stride(3), either(by_channel, over_channels, over_columns),
            either(by_channel, over_columns, over_rows), either(by_channel, over_rows, over_channels),
            tile + at * phase, [&](A* to, const Pack<T, 1>& read) { *to = A(read.at[0]); });
  }
}

// The window of a strip: every column of it that a row of taps meets, by its phase.
template <int K, int S, int D, int SHIFT, class A>
struct Window {
  static constexpr int N = strip<A>, VECTORS = window_vectors<K, S, D, SHIFT, A>;
  A numbers[S][VECTORS * N];

  __device__ void load(const A* line, int apart) {
#pragma unroll
    for (int phase = 0; phase < S; phase++)
#pragma unroll
      for (int at = 0; at < VECTORS; at++) {
        const auto read = *reinterpret_cast<const Pack<A, N>*>(line + (phase * apart + at) * N);
#pragma unroll
        for (int p = 0; p < N; p++) numbers[phase][at * N + p] = read.at[p];
      }
  }
  // The number that tap `v` meets at pixel `p` of the strip; both are known to the compiler.
  __device__ A of(int v, int p) const { return numbers[(SHIFT + v * D) % S][(SHIFT + v * D) / S + p]; }
};

// Reads a strip from column `column` on, where columns below 0 and from `width` on are zeros. It is the
// column's remainder by the strip that tells R, where rows are read in strips: a piece that is read at once
// then lies wholly in the row or wholly outside.
template <int R, class T, class A>
__device__ void load_strip(const T* at, int column, int width, A (&to)[strip<A>]) {
  constexpr int N = strip<A>, HEAD = R % 2;  // after one of an odd column come pairs, and one more at the end
  if constexpr (R == 0) {
    Pack<T, N> read{};
    if (unsigned(column) < unsigned(width)) read = *reinterpret_cast<const Pack<T, N>*>(at);
#pragma unroll
    for (int p = 0; p < N; p++) to[p] = A(read.at[p]);
  } else {
#pragma unroll
    for (int p = 0; p < N; p++) {
      const bool is_second = p > HEAD && (p - HEAD) % 2 == 1, is_first = p >= HEAD && !is_second && p + 1 < N;
      if (is_first) {
        Pack<T, 2> read{};
        if (unsigned(column + p) < unsigned(width)) read = *reinterpret_cast<const Pack<T, 2>*>(at + p);
        to[p] = A(read.at[0]), to[p + 1] = A(read.at[1]);
      } else if (!is_second) {
        to[p] = unsigned(column + p) < unsigned(width) ? A(at[p]) : A(0);
      }
    }
  }
}

// The same, where a row is read number by number.
template <class T, class A>
__device__ void load_numbers(const T* at, int column, int width, int64_t apart, A (&to)[strip<A>]) {
#pragma unroll
  for (int p = 0; p < strip<A>; p++, at += apart)
    to[p] = unsigned(column + p) < unsigned(width) ? A(*at) : A(0);
}

// Writes COUNT numbers from column `column` on, except columns below 0 and from `width` on.
template <int COUNT, class T, class A>
__device__ void store_strip(T* at, int column, int width, int64_t apart, bool in_strips, const A* numbers) {
  constexpr int N = strip<A>;
  if (in_strips) {
#pragma unroll
    for (int first = 0; first < COUNT; first += N) {
      Pack<T, N> written;
#pragma unroll
      for (int p = 0; p < N; p++) written.at[p] = T(numbers[first + p]);
      if (unsigned(column + first) < unsigned(width)) *reinterpret_cast<Pack<T, N>*>(at + first) = written;
    }
  } else {
#pragma unroll
    for (int p = 0; p < COUNT; p++)
      if (unsigned(column + p) < unsigned(width)) at[p * apart] = T(numbers[p]);
  }
}

// Prefetches the two L2 lines with the ends of a part of a row. This needs no register, and nothing waits.
// Most tiles are not wider than that.
template <class T>
__device__ void fetch_ahead(const T* at, int last) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at + last));
#endif
}

}  // namespace tiled
