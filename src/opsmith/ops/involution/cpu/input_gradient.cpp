// The gradient of involution by its input: each pixel is the sum of the cotangents of the windows that
// contain it, weighted by their kernels.
//
// If windows are S pixels apart, pixel x = S t + phase - padding is reached by taps v = phase, phase + S, ...
// alone, from windows t, t - 1, ... So each phase is like a gradient for windows that are one pixel apart,
// with every S-th tap.
//
// If the processor multiplies pairs and rows of windows are one pixel apart, a lane contains two rows of
// taps: u in its second half and u + 1, which reaches the row above in the cotangent, in its first.
#include "pairs.h"

using namespace involution;

template <class A>
struct Block {
  const A* pixels;                        // what came for window t - (N - 1)
  const A* weights;                       // of that window, at the phase's first tap
  int64_t pitch;                          // numbers from one of the phase's taps to the next
  int64_t first, last;                    // of the windows from there on, those that there are
  int64_t rows, pixel_step, weight_step;  // of taps, or pairs of them, and what to go from one to the next
  bool odd = false;                       // whether behind the pairs there is a row that is none
  A* result;
  int64_t step, kept;  // numbers from one of its pixels to the next, and how many pixels there are
  int64_t ahead;       // numbers to the weights of the row below
};

// Adds the products of one row of taps to PB pixels that are S apart, for N taps and V vectors of channels.
template <class T, int N, int PB, int V, bool Inner, bool Alone, class A>
[[gnu::always_inline]] inline void add_row(Vector<A> (&sums)[PB * V], const Block<A>& it, const A* pixels,
                                           const A* weights) {
  const A* taps[N];
  each<N>([&](auto o) __attribute__((always_inline)) {
    taps[o] = weights + o * it.pitch;
    lanes::keep(taps[o]);
  });
  each<PB + N - 1>([&](auto q) __attribute__((always_inline)) {
    if (Inner || (q >= it.first && q < it.last)) {
      Vector<A> pixel[V];
      each<V>([&](auto k) __attribute__((always_inline)) {
        pixel[k] = lanes::load(pixels + (q * V + k) * count<A>);
      });
      if constexpr (V > 1) lanes::loaded(pixel[0]);  // as in the forward
      if constexpr (Alone) pixel[0] = first_alone(pixel[0]);
      each<N>([&](auto o) __attribute__((always_inline)) {
        constexpr int p = q + o - (N - 1);
        if constexpr (p >= 0 && p < PB)
          each<V>([&](auto k) __attribute__((always_inline)) {
            add_products<T>(sums[p * V + k], taps[o][q], pixel[k]);
          });
      });
    }
  });
}

template <class T, int N, int PB, int V, bool Inner, class A>
[[gnu::noinline]] void block(const Block<A>& it) {
  Vector<A> sums[PB * V] = {};
  const A *pixels = it.pixels, *weights = it.weights;
  for (int64_t row = 0; row < it.rows; row++, pixels += it.pixel_step, weights += it.weight_step) {
    add_row<T, N, PB, V, Inner, false, A>(sums, it, pixels, weights);
    each<N>([&](auto o)
                __attribute__((always_inline)) { __builtin_prefetch(weights + o * it.pitch + it.ahead); });
  }
  if constexpr (paired<T> == 2)  // a pair is where the row of its second tap is, one above
    if (it.odd) add_row<T, N, PB, V, Inner, true, A>(sums, it, pixels - it.pixel_step / 2, weights);
  each<PB>([&](auto p) __attribute__((always_inline)) {
    if (p < it.kept)
      each<V>([&](auto k) __attribute__((always_inline)) {
        std::memcpy(it.result + p * it.step + k * count<A>, &sums[p * V + k], sizeof(Vector<A>));
      });
  });
}

template <class T, int N, int V, class A>
void run(const Block<A>& it, int64_t width) {
  const bool inner = it.first <= 0 && it.last >= width + N - 1;
  constexpr int WIDE = widest<A>;
  if (width == WIDE) inner ? block<T, N, WIDE, V, true, A>(it) : block<T, N, WIDE, V, false, A>(it);
  else inner ? block<T, N, NARROW, V, true, A>(it) : block<T, N, NARROW, V, false, A>(it);
}

template <class A>
using Run = void (*)(const Block<A>&, int64_t);

// Function that computes a block with `taps` taps in a row; null if there is none for this number.
template <class T, int V, class A = Computed<T>>
Run<A> run_of(int64_t taps) {
  static constexpr Run<A> known[] = {nullptr,         run<T, 1, V, A>, run<T, 2, V, A>, run<T, 3, V, A>,
                                     run<T, 4, V, A>, run<T, 5, V, A>, nullptr,         run<T, 7, V, A>};
  return taps >= 0 && taps < int64_t(std::size(known)) ? known[taps] : nullptr;
}

// Computes a row of the result, phase by phase. `row` has the pixels and weights of window 0, of tap 0 in a
// row of taps; from one of these to the next lie `row.pitch` numbers.
template <class T, int V, class A>
void run_phases(const Block<A>& row, const Axis& across) {
  constexpr int one = V * count<A>;  // numbers of a pixel
  const int64_t S = across.stride, K = across.kernel;
  Block<A> it = row;
  for (int64_t phase = 0; phase < std::min(S, K); phase++) {
    const int64_t N = (K - phase + S - 1) / S;
    const int64_t begin = phase >= across.padding ? 0 : (across.padding - phase + S - 1) / S;
    const int64_t reach = across.size + across.padding - phase;  // t S < reach
    const int64_t end = reach <= 0 ? 0 : (reach + S - 1) / S;
    for (int64_t at = begin; at < end;) {
      const int64_t width = end - at > NARROW ? widest<A> : NARROW;
      const int64_t t = end - begin >= width ? std::min(at, end - width) : at;
      it.pixels = row.pixels + (t - (N - 1)) * one;
      it.weights = row.weights + phase * row.pitch + (t - (N - 1));
      it.pitch = S * row.pitch;
      it.first = N - 1 - t, it.last = across.result - (t - (N - 1));
      it.result = row.result + (t * S + phase - across.padding) * one;
      it.step = S * one, it.kept = std::min(width, end - t);
      run_of<T, V>(N)(it, width);
      at = t + width;
    }
  }
}

// Adds one row of taps to a row of the result, with any dilation and any number of taps: each tap by itself.
template <int V, class A>
void add_taps(const A* pixels, const A* weights, int64_t pitch, const Axis& across, A* result) {
  for (int64_t v = 0; v < across.kernel; v++) {
    const int64_t shift = v * across.dilation - across.padding;
    for (int64_t j = 0; j < across.result; j++) {
      const int64_t x = j * across.stride + shift;
      if (x < 0 || x >= across.size) continue;
      each<V>([&](auto k) __attribute__((always_inline)) {
        A* const sum = result + (x * V + k) * count<A>;
        const Vector<A> pixel = lanes::load(pixels + (j * V + k) * count<A>);
        lanes::store(sum, lanes::load(sum) + weights[v * pitch + j] * pixel);
      });
    }
  }
}

// Makes the weights that reach rows `turn` of the result pairs: of the taps u and u + 1 that are in its
// second half and in its first, for windows one pixel apart. Where only one of them reaches a row, the other
// is zero.
template <class T>
void pair_taps(const T* weights, const View<const T, 6>& weight, const Axis& down, const Span& turn,
               int64_t ahead, float* to, int64_t pitch) {
  const int64_t size = weight.size(5), K = weight.size(3);
  const bool flat = weight.stride(5) == 1 && weight.stride(4) == size;
  for (int64_t u = 0; u < down.kernel; u += 2) {
    const bool alone = u + 1 == down.kernel;
    // Rows of the result that a row of taps reaches, of which the first is window 0's.
    auto reached = [&](int64_t tap) { return Span{tap - down.padding, tap - down.padding + down.result}; };
    const Span second = reached(u), first = alone ? second : reached(u + 1);
    for (int64_t y = turn.first; y < turn.last;) {
      const bool has_first = y >= first.first && y < first.last;
      const bool has_second = !alone && y >= second.first && y < second.last;
      const Span both = Span{y, std::min(first.last, second.last)}.within(turn);
      const int64_t many = has_first && (has_second || alone) && flat ? both.last - y : 1;
      for (int64_t v = 0; v < K && (has_first || has_second); v++) {
        auto of = [&](int64_t tap) {
          return weights + tap * weight.stride(2) + v * weight.stride(3) +
                 (y - reached(tap).first) * weight.stride(4);
        };
        pair_up(has_first ? of(alone ? u : u + 1) : nullptr, has_second ? of(u) : nullptr, weight.stride(5),
                many * size, to + (u / 2 * K + v) * pitch + (y - turn.first) * size, ahead);
      }
      y += many;
    }
  }
}

// True if rows of the result are computed phase by phase: each phase of its taps has an unrolled block.
template <class T>
bool in_phases(const Axis& down, const Axis& across) {
  const int64_t S = across.stride, K = across.kernel;
  bool all = down.dilation == 1 && across.dilation == 1;
  for (int64_t phase = 0; phase < std::min(S, K); phase++) all = all && run_of<T, 1>((K - phase + S - 1) / S);
  return all;
}

// Plan of a call: the path for its steps, the size of a piece, and the scratch memory.
template <class T>
struct Plan {
  using A = Computed<T>;
  static constexpr int L = count<A>, V = vectors_at_once<A>;

  Axis down, across;
  bool direct;    // weights are read where they lie
  bool streamed;  // the result bypasses the caches
  bool phased = in_phases<T>(down, across);
  bool in_pairs = paired<T> == 2 && phased && down.stride == 1;  // lanes hold two rows of taps

  // Pixels of a band of the cotangent; in pairs also one whose first has no row there.
  int64_t columns = across.result;
  int64_t most =
      std::max<int64_t>(1, (1 << 18) / int64_t(sizeof(A)) / (columns * V * L) * down.stride -
                               (down.kernel - 1) * down.dilation);
  int64_t band = std::min(most, down.size);
  int64_t rows = std::min((band - 1 + (down.kernel - 1) * down.dilation) / down.stride + 2, down.result);
  int64_t above = in_pairs;
  int64_t together = rows_together<T>(band, across.size);
  int64_t tap_pitch = tap_pitch_of<A>(together * across.result);

  int64_t for_pixels = (rows + above) * columns * V * L;
  int64_t for_result = together * across.size * V * L;
  int64_t for_weights = direct ? 0 : down.kernel * across.kernel * tap_pitch;

  Plan(const Axes& axes, const View<const T, 4>& cotangent, const View<const T, 6>& weight,
       const View<T, 4>& result)
      : down(axes.down),
        across(axes.across),
        direct(std::is_same_v<T, A> && weight.stride(5) == 1),
        streamed((cotangent.numel() + weight.numel() + result.numel()) * int64_t(sizeof(T)) > LARGE) {}

  // Rows of the cotangent that reach these of the result.
  Span reaching(int64_t first, int64_t last) const {
    const int64_t lowest = first + down.padding - (down.kernel - 1) * down.dilation;
    const int64_t from = lowest <= 0 ? 0 : std::min(down.result, (lowest + down.stride - 1) / down.stride);
    return {from, std::clamp<int64_t>((last - 1 + down.padding) / down.stride + 1, from, down.result)};
  }
  // The row of the cotangent from which taps `u` reach row `y` of the result; -1 where there is none.
  int64_t row_at(int64_t y, int64_t u) const {
    const int64_t past = y + down.padding - u * down.dilation;
    return past >= 0 && past % down.stride == 0 && past / down.stride < down.result ? past / down.stride : -1;
  }
};

// Rows of the result that are computed one after the other, and what of.
template <class T, class A>
struct Turn {
  Span rows;
  const T* weights;  // of the group
  A* widened;        // those that reach these rows, where they are not read as they lie
  Pixels<A> pixels;  // the cotangent
  int64_t from;      // its row that comes first there

  // The weights of a row of taps, at row `i` of the cotangent.
  const A* taps_at(const Plan<T>& plan, const View<const T, 6>& weight, int64_t u, int64_t i) const {
    if constexpr (std::is_same_v<T, A>)
      if (plan.direct) return weights + u * weight.stride(2) + i * weight.stride(4);
    const int64_t first = plan.down.reached(u, rows).first;
    return widened + u * plan.across.kernel * plan.tap_pitch + (i - first) * plan.columns;
  }
};

// Copies the weights of a turn, or makes pairs of them, as its path has them.
template <class T, class A>
void prepare(const Plan<T>& plan, const View<const T, 6>& weight, const Turn<T, A>& turn) {
  const Axis& down = plan.down;
  const int64_t next = (plan.together + down.stride - 1) / down.stride * weight.stride(4);
  if constexpr (paired<T> == 2)
    if (plan.in_pairs) pair_taps(turn.weights, weight, down, turn.rows, next, turn.widened, plan.tap_pitch);
  auto rows_of = [&](int64_t u) {
    const Span reached = down.reached(u, turn.rows);
    return std::pair{reached.within({0, down.result}), reached.first};
  };
  if (!plan.direct && !plan.in_pairs)
    widen_rows(turn.weights, weight, rows_of, next, turn.widened, plan.tap_pitch);
}

// Computes row `y` of the result.
template <int V, class T, class A>
void compute_row(const Plan<T>& plan, const View<const T, 6>& weight, const Turn<T, A>& turn, int64_t y,
                 A* row) {
  constexpr int one = V * count<A>;  // numbers of a pixel
  const Axis &down = plan.down, &across = plan.across;
  const int64_t columns = plan.columns, of_row = across.kernel * plan.tap_pitch;
  std::memset(row, 0, across.size * one * sizeof(A));
  int64_t first_tap = -1, last_tap = -1, rows_of_taps = 0;
  for (int64_t u = 0; u < down.kernel; u++) {
    if (plan.row_at(y, u) < 0) continue;
    if (first_tap < 0) first_tap = u;
    last_tap = u;
    rows_of_taps++;
  }
  if (rows_of_taps == 0) return;
  Block<A> it;
  it.result = row;
  it.pitch = plan.direct ? weight.stride(3) : plan.tap_pitch;
  it.ahead = plan.direct ? weight.stride(4) : 0;
  if (plan.in_pairs) {
    const int64_t pair = first_tap / 2;
    it.pixels = turn.pixels.at(y + down.padding - 2 * pair - 1 - turn.from, 0);
    it.weights = turn.widened + pair * of_row + (y - turn.rows.first) * columns;
    it.odd = last_tap % 2 == 0 && last_tap == down.kernel - 1;
    it.rows = last_tap / 2 + 1 - it.odd - pair;
    it.pixel_step = -2 * columns * one, it.weight_step = of_row;
    run_phases<T, V>(it, across);
  } else if (plan.phased) {
    const int64_t i = plan.row_at(y, first_tap);
    it.pixels = turn.pixels.at(i - turn.from, 0);
    it.weights = turn.taps_at(plan, weight, first_tap, i);
    it.rows = rows_of_taps, it.pixel_step = -columns * one;
    it.weight_step = plan.direct ? down.stride * weight.stride(2) - weight.stride(4) : down.stride * of_row;
    run_phases<T, V>(it, across);
  } else {
    for (int64_t u = first_tap; u <= last_tap; u++) {
      const int64_t i = plan.row_at(y, u);
      if (i < 0) continue;
      add_taps<V>(turn.pixels.at(i - turn.from, 0), turn.taps_at(plan, weight, u, i), it.pitch, across, row);
    }
  }
}

// The size of the image. All sizes that the reference refuses are refused here, too: it is not called for
// sizes from C++.
template <class T>
Shape sizes(View<const T, 4> cotangent, View<const T, 6> weight, List<int64_t> size, List<int64_t> stride,
            List<int64_t> padding, List<int64_t> dilation) {
  fitted({size[0], cotangent.size(2), weight.size(2), stride[0], padding[0], dilation[0]},
         {size[1], cotangent.size(3), weight.size(3), stride[1], padding[1], dilation[1]}, cotangent.size(1),
         weight.size(1));
  expect_same(cotangent.size(0), weight.size(0));
  expect_same(cotangent.size(2), weight.size(4));
  expect_same(cotangent.size(3), weight.size(5));
  return {cotangent.size(0), cotangent.size(1), size[0], size[1]};
}

// Computes V vectors of channels, from one on.
template <int V, class T, class A>
void compute_channels(const Plan<T>& plan, const View<const T, 4>& cotangent, const View<const T, 6>& weight,
                      const Share& share, int64_t first, int64_t channels, Turn<T, A>& turn, A* scratch,
                      const View<T, 4>& result) {
  constexpr int L = count<A>;
  const Span reaching = plan.reaching(share.first, share.last);
  const Pixels<A> all{scratch, plan.columns, V * L};
  A* const results = scratch + plan.for_pixels;
  turn.pixels = {all.at(plan.above, 0), all.pitch, all.step};
  turn.from = reaching.first;
  each<V>([&](auto k) {
    gather(planes(cotangent, share.batch, first + k * L, std::min<int64_t>(L, channels - k * L)),
           reaching.first, reaching.last, Pixels<A>{turn.pixels.data + k * L, all.pitch, all.step});
  });
  if constexpr (paired<T> == 2)
    if (plan.in_pairs)
      pair_rows_of_pixels(all, Span{plan.above, plan.above + reaching.last - reaching.first}, 1);
  for (int64_t start = share.first; start < share.last; start += plan.together) {
    turn.rows = {start, std::min(start + plan.together, share.last)};
    prepare(plan, weight, turn);
    for (int64_t y = start; y < turn.rows.last; y++)
      compute_row<V>(plan, weight, turn, y, results + (y - start) * plan.across.size * V * L);
    each<V>([&](auto k) {
      const Planes<T> out =
          planes(result, share.batch, first + k * L, std::min<int64_t>(L, channels - k * L));
      scatter(results + k * L, V * L, out, start, turn.rows.last, plan.streamed);
    });
  }
}

template <class T>
void input_gradient(View<const T, 4> cotangent, View<const T, 6> weight, List<int64_t> size,
                    List<int64_t> stride, List<int64_t> padding, List<int64_t> dilation, View<T, 4> result) {
  using A = Computed<T>;
  constexpr int L = count<A>, V = vectors_at_once<A>;
  const Plan<T> plan(
      fitted({size[0], cotangent.size(2), weight.size(2), stride[0], padding[0], dilation[0]},
             {size[1], cotangent.size(3), weight.size(3), stride[1], padding[1], dilation[1]},
             cotangent.size(1), weight.size(1)),
      cotangent, weight, result);
  const int64_t groups = weight.size(1), of_group = cotangent.size(1) / groups;
  const int64_t in_all = plan.for_pixels + plan.for_result + plan.for_weights + L;
  in_shares<A>(
      cotangent.size(0), groups, plan.down.size, plan.most, in_all, [&](const Share& share, A* scratch) {
        Turn<T, A> turn;
        turn.weights = weight.data + share.batch * weight.stride(0) + share.group * weight.stride(1);
        turn.widened = scratch + plan.for_pixels + plan.for_result;
        for (int64_t at = 0; at < of_group;) {
          const int64_t channels = std::min<int64_t>(V * L, of_group - at);
          const int64_t first = share.group * of_group + at;
          if (channels > L)
            compute_channels<V>(plan, cotangent, weight, share, first, channels, turn, scratch, result);
          else compute_channels<1>(plan, cotangent, weight, share, first, channels, turn, scratch, result);
          at += channels;
        }
        lanes::settle();
      });
}
