// The gradient of involution by its weight: at each pixel, the products of its cotangent with the pixels of
// its window, summed over the channels of a group.
//
// Vectors are pixels of a row. If the processor can load single lanes of a vector, the image is read without
// a copy, and lanes beyond it are left out; a vector contains as many narrow rows as fit. Otherwise both
// tensors are first copied channel by channel, with zeros around each row. If windows are S pixels apart,
// every S-th pixel of the image is grouped, so that all loads are contiguous. If the processor multiplies
// pairs, a row contains two channels: this halves the rows and the products.
#include <array>
#include <vector>

#include "pairs.h"

using namespace involution;

// Rows of a band, each in layers: its channels, or pairs of them.
template <class A>
struct Rows {
  A* data;
  int64_t row_step, layer_step;  // numbers from one to the next

  A* at(int64_t row, int64_t layer) const { return data + row * row_step + layer * layer_step; }
};

// Copies a row that lies as it is to be read: the last vector may copy some numbers again.
template <class A>
[[gnu::always_inline]] inline void copy_row(const A* from, int64_t size, A* to) {
  constexpr int L = count<A>;
  if (size < L) return lanes::store(to, lanes::load_some(from, size));
  for (int64_t at = 0; at < size; at += L) {
    const int64_t place = std::min(at, size - L);
    lanes::store(to + place, lanes::load(from + place));
  }
}

// Lays out a row of a channel, or of a pair of them: every `step`-th number, from a column on.
template <class T, class A = Computed<T>>
void lay_out_row(const Planes<const T>& from, int64_t layer, int64_t row, int64_t column, int64_t step,
                 int64_t size, A* to) {
  const int64_t channel = layer * paired<T>, stride = step * from.column_stride;
  const T* first = from.at(channel, row, column);
  if constexpr (std::is_same_v<T, A>)
    if (stride == 1) return copy_row(first, size, to);
  if constexpr (paired<T> == 2) {
    const T* second = channel + 1 < from.channels ? first + from.channel_stride : nullptr;
    pair_up(first, second, stride, size, to, 2 * from.channel_stride);
  } else {
    widen(first, stride, size, to, from.channel_stride);
  }
}

template <class A, class T>
struct Block {
  const A* image;      // at the first pixel's first tap, in the first layer
  int64_t image_step;  // numbers to the next layer
  int64_t phases;      // numbers from a phase of a row to the next
  const A* cotangent;
  int64_t cotangent_step, cotangent_row;  // numbers to the next layer, and to the next row
  int64_t layers;
  T* result;                // of the first tap, at the first pixel
  int64_t kept, kept_last;  // numbers of a vector that are written there, and of the last one
  int64_t tap;              // numbers to the next tap
  int64_t next_row;         // and to the one that the next row of the cotangent has here
  int64_t ahead;            // and to the one that is written next, which is fetched meanwhile
  // Of an image that is read where it lies, the lanes whose column is in it, for each tap, and whose row is.
  const lanes::Mask* columns_inside;
  lanes::Mask rows_inside;
};

// Numbers that are written of one of some vectors.
template <class A, class T>
[[gnu::always_inline]] inline int64_t kept_of(const Block<A, T>& it, int64_t vector, int64_t vectors) {
  return vector == vectors - 1 ? it.kept_last : it.kept;
}

// Of K taps of R rows, how many registers hold the sums of, beside a pixel and what came for the rows.
template <int K, int R>
constexpr int taps_at_once() {
  const int most = std::max(1, (lanes::registers - R - 1) / R), pieces = (K + most - 1) / most;
  return (K + pieces - 1) / pieces;
}

// One row of the image with R rows of the cotangent: V taps of each, from one on, windows S pixels apart.
template <int FIRST, int V, int S, int R, bool Direct, class A, class T>
[[gnu::always_inline]] inline void compute_taps(const Block<A, T>& it) {
  if (it.ahead > 0)
    each<R>([&](auto r) __attribute__((always_inline)) {
      each<V>([&](auto at) __attribute__((always_inline)) {
        __builtin_prefetch(it.result + r * it.next_row + (FIRST + at) * it.tap + it.ahead, 1);
      });
    });
  lanes::Mask inside[V];
  if constexpr (Direct)
    each<V>([&](auto at) __attribute__((always_inline)) {
      inside[at] = it.columns_inside[FIRST + at] & it.rows_inside;
      lanes::keep(inside[at]);
    });
  Vector<A> sums[R * V] = {};
  const A *image = it.image, *cotangent = it.cotangent;
  for (int64_t layer = 0; layer < it.layers; layer++) {
    Vector<A> came[R];
    each<R>([&](auto r) __attribute__((always_inline)) {
      came[r] = lanes::load(cotangent + r * it.cotangent_row);
      lanes::loaded(came[r]);
    });
    each<V>([&](auto at) __attribute__((always_inline)) {
      constexpr int v = FIRST + at;
      Vector<A> pixels;
      if constexpr (Direct) pixels = lanes::load_lanes(image + v, inside[at]);
      else pixels = lanes::load(image + v % S * it.phases + v / S);
      lanes::loaded(pixels);
      each<R>([&](auto r)
                  __attribute__((always_inline)) { add_products<T>(sums[r * V + at], came[r], pixels); });
    });
    image += it.image_step, cotangent += it.cotangent_step;
  }
  T* const result = it.result;
  const int64_t next_row = it.next_row, tap = it.tap;
  each<R>([&](auto r) __attribute__((always_inline)) {
    const int64_t kept = kept_of(it, r, R);
    each<V>([&](auto at) __attribute__((always_inline)) {
      T* target = result + r * next_row + (FIRST + at) * tap;
      if (kept >= count<A>) lanes::store(target, sums[r * V + at]);
      else lanes::store_some(target, sums[r * V + at], kept);
    });
  });
}

// All K taps, as many at once as registers hold.
template <int K, int S, int R, bool Direct, class A, class T>
[[gnu::noinline]] void block(const Block<A, T>& it) {
  constexpr int V = taps_at_once<K, R>();
  each<(K + V - 1) / V>([&](auto piece) __attribute__((always_inline)) {
    compute_taps<piece * V, std::min(V, K - piece * V), S, R, Direct>(it);
  });
}

template <class A, class T>
using Run = void (*)(const Block<A, T>&);

// Maximum number of vectors of rows of the cotangent that are computed at once.
template <bool Direct>
constexpr int most_at_once = lanes::registers == 16 ? 3 : Direct ? 6 : 4;

// Functions that compute K taps of 1, 2, ... of them.
template <int K, int S, bool Direct, class A, class T, int... R>
constexpr auto each_of_rows(std::integer_sequence<int, R...>) {
  return std::array<Run<A, T>, sizeof...(R)>{block<K, S, R + 1, Direct, A, T>...};
}
template <int K, int S, bool Direct, class A, class T>
constexpr auto runs =
    each_of_rows<K, S, Direct, A, T>(std::make_integer_sequence<int, most_at_once<Direct>>{});

// The functions for windows S pixels apart, without dilation; null for other kernels.
template <int S, bool Direct, class A, class T>
const Run<A, T>* unrolled(int64_t kernel) {
  if (kernel == 3) return runs<3, S, Direct, A, T>.data();
  if (kernel == 5) return runs<5, S, Direct, A, T>.data();
  if (kernel == 7) return runs<7, S, Direct, A, T>.data();
  return nullptr;
}

// Functions and sizes by which taps are computed. The defaults are for any steps, a tap and a row at a time.
template <class T>
struct Path {
  using A = Computed<T>;
  static constexpr Run<A, T> one = block<1, 1, 1, false, A, T>;

  const Run<A, T>* run = &one;       // for 1, 2, ... vectors of rows of the cotangent
  int64_t several = 1, at_once = 1;  // vectors of rows, and taps, that one call computes at most
  bool direct = false;               // the image is read without a copy
  bool came_direct = false;          // and so is the cotangent
  int64_t fold = 1;                  // rows that a vector holds
};

template <class T>
Path<T> path_of(const Axes& axes, const Planes<const T>& input, const Planes<const T>& cotangent) {
  using A = Computed<T>;
  const Axis &down = axes.down, &across = axes.across;
  Path<T> path;
  if constexpr (std::is_same_v<T, A>)
    path.came_direct = cotangent.column_stride == 1 && across.result >= count<A>;
  if (down.dilation != 1 || across.dilation != 1 || across.stride > 2) return path;
  const Run<A, T>* run =
      across.stride == 1 ? unrolled<1, false, A, T>(across.kernel) : unrolled<2, false, A, T>(across.kernel);
  if (!run) return path;
  if constexpr (lanes::masked && std::is_same_v<T, A>) {
    path.direct = across.stride == 1 && input.column_stride == 1;
    if (path.direct) run = unrolled<1, true, A, T>(across.kernel);
  }
  path.run = run, path.at_once = across.kernel;
  path.several = path.direct ? most_at_once<true> : most_at_once<false>;
  if (path.direct && down.stride == 1 && across.size == across.result && input.flat() && cotangent.flat())
    path.fold = std::clamp<int64_t>(count<A> / across.result, 1, down.result);
  return path;
}

constexpr int GATHERED = 6;  // rows of a result at least, where they are gathered

// Numbers in whole cache lines, an odd number of lines, so that the channels do not all use the same places
// of the cache.
template <class A>
int64_t odd_lines(int64_t numbers) {
  const int64_t line = 64 / sizeof(A), lines = (numbers + line - 1) / line;
  return (lines | 1) * line;
}

// Plan of a call: the function that computes its taps, the size of a piece, and the scratch memory.
template <class T>
struct Plan {
  using A = Computed<T>;
  static constexpr int L = count<A>;

  Axis down, across;
  int64_t layers;  // channels of a group, or pairs of them
  Path<T> path;

  // A row: of the cotangent whole vectors, of the image as many in each phase, and what taps look further.
  // Vectors are written whole, the last with zeros behind its end.
  int64_t vectors = (across.result + L - 1) / L;
  int64_t in_phase = vectors * L + (across.kernel - 1) * across.dilation / across.stride + 1 + L;
  int64_t image_pitch = odd_lines<A>(in_phase * across.stride), came_pitch = odd_lines<A>(vectors * L);
  int64_t each_row = layers * (image_pitch * down.stride + came_pitch);
  int64_t most = std::max<int64_t>(
      1, (1 << 19) / int64_t(sizeof(A)) / each_row - (down.kernel - 1) * down.dilation / down.stride);
  int64_t band = std::min(most, down.result);

  // A result that no cache holds is gathered in scratch, as many rows of it as are computed together, and
  // then streamed.
  int64_t taps = down.kernel * across.kernel;
  bool streamed;
  int64_t tile = path.several * path.fold;  // rows that are computed at once
  int64_t together = streamed ? (GATHERED + tile - 1) / tile * tile : tile;
  int64_t tap_pitch = tap_pitch_of<A>(together * across.result);

  int64_t for_image = path.direct ? 0 : down.extent(band) * layers * image_pitch;
  int64_t for_came = path.came_direct ? 0 : band * layers * came_pitch;
  int64_t for_beyond = band * vectors * L;
  int64_t for_result = streamed ? taps * tap_pitch : 0;

  // Of each of a row's vectors the lanes whose column is in the image, for each of the taps.
  std::vector<lanes::Mask> inside;

  // For so many groups in all images, of which these are the first.
  Plan(const Axes& axes, int64_t groups, const Planes<const T>& input, const Planes<const T>& cotangent)
      : down(axes.down),
        across(axes.across),
        layers((input.channels + paired<T> - 1) / paired<T>),
        path(path_of<T>(axes, input, cotangent)),
        streamed(taps * down.result * across.result * groups * int64_t(sizeof(T)) > LARGE) {
    for (int64_t j = 0; path.direct && j < vectors; j++)
      for (int64_t v = 0; v < across.kernel; v++)
        inside.push_back(columns_inside(place_of(j) + v - across.padding));
  }

  // Lanes whose column is in the image, of a vector that begins at column `first`, which may be negative.
  lanes::Mask columns_inside(int64_t first) const {
    const Span columns = Span{-first, across.size - first}.within({0, std::min<int64_t>(L, across.result)});
    lanes::Mask mask = 0;
    for (int64_t row = 0; row < path.fold; row++)
      mask |= (lanes::first(columns.last) & ~lanes::first(columns.first)) << row * across.result;
    return mask;
  }

  // Lanes whose row is in the image, of a vector that begins at row `first`, which may be negative.
  lanes::Mask rows_inside(int64_t first) const {
    const Span rows = Span{-first, down.size - first}.within({0, path.fold});
    const int64_t size = std::min<int64_t>(L, across.result);
    return lanes::first(rows.last * size) & ~lanes::first(rows.first * size);
  }

  // The first pixel of one of a row's vectors. The last may compute some pixels again.
  int64_t place_of(int64_t vector) const {
    return std::max<int64_t>(0, std::min(vector * L, across.result - L));
  }
};

// A share's rows of both tensors, as vectors read them.
template <class A>
struct Band {
  Rows<const A> image, came;
  const A* beyond;     // of each row of the cotangent, what a tap beyond the image brings
  int64_t top, first;  // the rows of the image and of the cotangent that come first there
};

// Lays out the rows of a share, in memory that has zeros where no share writes: at their sides.
template <class T, class A>
Rows<const A> lay_out_image(const Plan<T>& plan, const Planes<const T>& input, const Span& window,
                            A* scratch) {
  const Axis &down = plan.down, &across = plan.across;
  const int64_t S = across.stride;
  const Rows<A> image{scratch, plan.layers * plan.image_pitch, plan.image_pitch};
  const Span inside = window.within({0, down.size});
  for (int64_t phase = 0; phase < S; phase++) {
    const int64_t begin = phase >= across.padding ? 0 : (across.padding - phase + S - 1) / S;
    const int64_t x = begin * S + phase - across.padding;
    const int64_t size =
        std::min(plan.in_phase - plan.L - begin, x < across.size ? (across.size - x + S - 1) / S : 0);
    if (size <= 0) continue;
    for (int64_t c = 0; c < plan.layers; c++)  // planes from end to end, as memory is read fastest
      for (int64_t y = inside.first; y < inside.last; y++)
        lay_out_row(input, c, y, x, S, size, image.at(y - window.first, c) + phase * plan.in_phase + begin);
  }
  return {image.data, image.row_step, image.layer_step};
}

template <class T, class A>
Rows<const A> lay_out_cotangent(const Plan<T>& plan, const Planes<const T>& cotangent, const Share& share,
                                A* scratch) {
  const Rows<A> came{scratch, plan.layers * plan.came_pitch, plan.came_pitch};
  for (int64_t c = 0; c < plan.layers; c++)
    for (int64_t i = share.first; i < share.last; i += plan.path.fold)
      lay_out_row(cotangent, c, i, 0, 1, std::min(plan.path.fold, share.last - i) * plan.across.result,
                  came.at(i - share.first, c));
  return {came.data, came.row_step, came.layer_step};
}

// Prepares the rows of a share. Rows that can be read without a copy are not copied.
template <class T, class A>
Band<A> make_ready(const Plan<T>& plan, const Planes<const T>& input, const Planes<const T>& cotangent,
                   const Share& share, A* scratch) {
  constexpr int L = count<A>;
  const Axis& down = plan.down;
  const Span window = down.window({share.first, share.last});
  A* const beyond = scratch + plan.for_image + plan.for_came;
  Band<A> band{{}, {}, beyond, window.first, share.first};
  if constexpr (std::is_same_v<T, A>) {
    if (plan.path.direct)
      band.image = {input.at(0, window.first, -plan.across.padding), input.row_stride, input.channel_stride};
    if (plan.path.came_direct)
      band.came = {cotangent.at(0, share.first, 0), cotangent.row_stride, cotangent.channel_stride};
  }
  if (!band.image.data) band.image = lay_out_image(plan, input, window, scratch);
  if (!band.came.data) band.came = lay_out_cotangent(plan, cotangent, share, scratch + plan.for_image);
  // The reference multiplies the cotangent with the zeros around the image: nan where it is not finite.
  for (int64_t i = share.first; i < share.last; i += plan.path.fold) {
    const int64_t rows = std::min(plan.path.fold, share.last - i);
    const Span taps = down.taps_of(i), last = down.taps_of(i + rows - 1);
    if (taps.first == 0 && last.last == down.kernel) continue;
    for (int64_t j = 0; j < plan.vectors; j++) {
      Vector<A> sum{};
      const A* came = band.came.at(i - share.first, 0) + plan.place_of(j);
      for (int64_t c = 0; c < plan.layers; c++, came += band.came.layer_step)
        add_products<T>(sum, Vector<A>{}, lanes::load(came));
      lanes::store(beyond + ((i - share.first) * plan.vectors + j) * L, sum);
    }
  }
  return band;
}

// Results of a row of taps beyond the image, for some rows of the cotangent.
template <class T, class A>
void put_beyond(const Block<A, T>& it, int64_t taps, const A* sums, int64_t step, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    const Vector<A> sum = lanes::load(sums + r * step);
    const int64_t kept = kept_of(it, r, rows);
    for (int64_t v = 0; v < taps; v++) {
      T* tap = it.result + r * it.next_row + v * it.tap;
      if (kept >= count<A>) lanes::store(tap, sum);
      else lanes::store_some(tap, sum, kept);
    }
  }
}

// Computes a tile: as many rows of the result as are computed at once. The first goes to `target`, where taps
// are `tap_step` numbers apart.
template <class T, class A>
void compute_tile(const Plan<T>& plan, const Band<A>& band, const Span& tile, T* target, int64_t tap_step) {
  constexpr int L = count<A>;
  const Axis &down = plan.down, &across = plan.across;
  // Rows of the cotangent are counted in vectors, as many rows in each as are folded.
  const int64_t fold = plan.path.fold, K = across.kernel;
  const int64_t rows = tile.last - tile.first, tall = (rows + fold - 1) / fold;
  const int64_t last_rows = rows - (tall - 1) * fold;  // of the last vector
  const int64_t apart = plan.path.several > 1 ? fold * down.stride : 0;
  Block<A, T> it;
  it.image_step = band.image.layer_step, it.phases = plan.in_phase;
  it.cotangent_step = band.came.layer_step, it.cotangent_row = fold * band.came.row_step;
  it.layers = plan.layers;
  it.ahead = plan.streamed ? 0 : plan.tile * across.result;
  it.tap = tap_step, it.next_row = fold * across.result - apart * K * tap_step;
  // Row by row of the image: it is tap `at` of the tile's first row.
  int64_t low = 0, high = 0;  // the vectors that see it
  for (int64_t at = 0; at < (tall - 1) * apart + down.kernel; at++) {
    while (low * apart + down.kernel <= at) low++;
    while (high + 1 < tall && (high + 1) * apart <= at) high++;
    if (low > high) continue;  // windows are further apart than their height
    const int64_t i = tile.first + low * fold, u = at - low * apart;
    const int64_t y = i * down.stride + u * down.dilation - down.padding;
    const bool beyond = y + fold <= 0 || y >= down.size;
    it.rows_inside = plan.path.direct ? plan.rows_inside(y) : 0;
    for (int64_t vector = 0; vector < plan.vectors; vector++) {
      const int64_t j = plan.place_of(vector);
      it.cotangent = band.came.at(i - band.first, 0) + j;
      it.kept = plan.streamed ? L : fold * across.result - j;
      it.kept_last = plan.streamed ? L : (high == tall - 1 ? last_rows : fold) * across.result - j;
      it.columns_inside = plan.inside.data() + vector * K;
      T* const first = target + u * K * tap_step + low * fold * across.result + j;
      if (beyond) {
        it.result = first;
        put_beyond(it, K, band.beyond + ((i - band.first) * plan.vectors + vector) * L,
                   fold * plan.vectors * L, high - low + 1);
        continue;
      }
      for (int64_t v = 0; v < K; v += plan.path.at_once) {
        it.image = band.image.at(y - band.top, 0) + j;
        if (const int64_t shift = v * across.dilation)
          it.image += shift % across.stride * plan.in_phase + shift / across.stride;
        it.result = first + v * tap_step;
        plan.path.run[high - low](it);
      }
    }
  }
}

// The size of the weight. All sizes that the reference refuses are refused here, too: it is not called for
// sizes from C++.
template <class T>
Shape sizes(View<const T, 4> cotangent, View<const T, 4> input, int64_t groups, List<int64_t> kernel,
            List<int64_t> stride, List<int64_t> padding, List<int64_t> dilation) {
  fitted({input.size(2), cotangent.size(2), kernel[0], stride[0], padding[0], dilation[0]},
         {input.size(3), cotangent.size(3), kernel[1], stride[1], padding[1], dilation[1]}, input.size(1),
         groups);
  expect_same(cotangent.size(0), input.size(0));
  expect_same(cotangent.size(1), input.size(1));
  return {input.size(0), groups, kernel[0], kernel[1], cotangent.size(2), cotangent.size(3)};
}

template <class T>
void weight_gradient(View<const T, 4> cotangent, View<const T, 4> input, int64_t groups, List<int64_t> kernel,
                     List<int64_t> stride, List<int64_t> padding, List<int64_t> dilation,
                     Contiguous<T, 6> result) {
  using A = Computed<T>;
  const Axes axes =
      fitted({input.size(2), cotangent.size(2), kernel[0], stride[0], padding[0], dilation[0]},
             {input.size(3), cotangent.size(3), kernel[1], stride[1], padding[1], dilation[1]}, input.size(1),
             groups);
  const int64_t batches = input.size(0), channels = input.size(1) / groups;
  const Plan<T> plan(axes, batches * groups, planes(input, 0, 0, channels),
                     planes(cotangent, 0, 0, channels));
  const Axis &down = plan.down, &across = plan.across;
  const int64_t in_all = plan.for_image + plan.for_came + plan.for_beyond + plan.for_result;
  in_shares<A>(batches, groups, down.result, plan.most, in_all, [&](const Share& share, A* scratch) {
    const Band<A> band =
        make_ready(plan, planes(input, share.batch, share.group * channels, channels),
                   planes(cotangent, share.batch, share.group * channels, channels), share, scratch);
    T* const gathered = reinterpret_cast<T*>(scratch + in_all - plan.for_result);
    T* const results = result.data + share.batch * result.stride(0) + share.group * result.stride(1);
    for (int64_t start = share.first; start < share.last; start += plan.together) {
      const int64_t end = std::min(start + plan.together, share.last);
      // Destination of the results of row `start`, and the distance of taps there.
      T* const target = plan.streamed ? gathered : results + start * result.stride(4);
      const int64_t tap_step = plan.streamed ? plan.tap_pitch : result.stride(3);
      for (int64_t row = start; row < end; row += plan.tile)
        compute_tile(plan, band, Span{row, std::min(row + plan.tile, end)},
                     target + (row - start) * across.result, tap_step);
      for (int64_t tap = 0; plan.streamed && tap < plan.taps; tap++) {
        T* const to = results + tap * result.stride(3) + start * result.stride(4);
        lanes::stream(gathered + tap * plan.tap_pitch, to, (end - start) * across.result);
      }
    }
    lanes::settle();
  });
}
