// Involution: each pixel of the result is the sum of the pixels around it, weighted by the kernel of that
// pixel. If the processor multiplies pairs, a lane contains two rows of taps, or of the image.
#include "few_channels.h"
#include "pairs.h"

using namespace involution;

// Adds one row of K taps to PB consecutive pixels, whose windows are S pixels apart. Each pixel of the image
// is loaded once, with all V vectors of its channels, and multiplied with the weights of all windows that
// contain it. The zeros at the `Left` and at the `Right` side of the image are left out. In the last row of
// an odd number of rows, pixels are `Alone`: without a row below.
template <class T, int K, int S, int PB, int V, bool Left, bool Right, bool Alone, class A>
[[gnu::always_inline]] inline void add_row(Vector<A> (&sums)[PB * V], const A* pixels, const A* weights,
                                           int64_t pitch) {
  const A* taps[K];
  each<K>([&](auto v) __attribute__((always_inline)) {
    taps[v] = weights + v * pitch;
    lanes::keep(taps[v]);
  });
  constexpr int first = Left ? K / 2 : 0, last = (PB - 1) * S + K - (Right ? K / 2 : 0);
  each<last - first>([&](auto inside) __attribute__((always_inline)) {
    constexpr int q = inside + first;
    Vector<A> pixel[V];
    each<V>([&](auto k) __attribute__((always_inline)) {
      pixel[k] = lanes::load(pixels + (q * V + k) * count<A>);
    });
    if constexpr (V > 1) lanes::loaded(pixel[0]);  // otherwise it is loaded for each product
    if constexpr (Alone) pixel[0] = first_alone(pixel[0]);
    each<K>([&](auto v) __attribute__((always_inline)) {
      constexpr int p = (q - v) / S;
      if constexpr (q >= v && (q - v) % S == 0 && p < PB)
        each<V>([&](auto k) __attribute__((always_inline)) {
          add_products<T>(sums[p * V + k], taps[v][p], pixel[k]);
        });
    });
  });
}

// Arguments of a block of pixels of one row.
template <class A>
struct Block {
  const A* pixels;   // the window of the first pixel, from row 0 of taps on
  int64_t row_step;  // numbers from a row of taps to the next, in the image
  const A* weights;  // of tap (0, 0), at the first pixel
  int64_t pitch;     // numbers from tap to tap
  Span taps;         // the rows of taps, or pairs of rows, that are inside the image
  bool odd = false;  // true if the last of these is not a pair
  const A* begin;    // initial values of the sums
  A* result;
  int64_t ahead;  // numbers to the weights that are used next
};

template <class T, int K, int S, int PB, int V, bool Left, bool Right, class A>
[[gnu::noinline]] void block(const Block<A>& it) {
  Vector<A> sums[PB * V];
  each<PB * V>([&](auto at) __attribute__((always_inline)) { sums[at] = all<A>(it.begin[at / V]); });
  const int64_t whole = it.taps.last - it.odd;
  for (int64_t u = it.taps.first; u < whole; u++) {
    const A* weights = it.weights + u * K * it.pitch;
    add_row<T, K, S, PB, V, Left, Right, false, A>(sums, it.pixels + u * it.row_step, weights, it.pitch);
    each<K>([&](auto v)
                __attribute__((always_inline)) { __builtin_prefetch(weights + v * it.pitch + it.ahead); });
  }
  if constexpr (paired<T> == 2) {
    const A* weights = it.weights + whole * K * it.pitch;
    const A* pixels = it.pixels + whole * it.row_step;
    if (it.odd) add_row<T, K, S, PB, V, Left, Right, true, A>(sums, pixels, weights, it.pitch);
  }
  each<PB * V>([&](auto at) __attribute__((always_inline)) {
    std::memcpy(it.result + at * count<A>, &sums[at], sizeof sums[at]);
  });
}

// Any kernel, stride and dilation.
template <int PB, int V, class A>
[[gnu::noinline]] void block_of_any(const Block<A>& it, const Axis& across) {
  Vector<A> sums[PB * V];
  each<PB * V>([&](auto at) __attribute__((always_inline)) { sums[at] = all<A>(it.begin[at / V]); });
  for (int64_t u = it.taps.first; u < it.taps.last; u++)
    for (int64_t v = 0; v < across.kernel; v++) {
      const A* weights = it.weights + (u * across.kernel + v) * it.pitch;
      const A* pixels = it.pixels + u * it.row_step + v * across.dilation * V * count<A>;
      each<PB>([&](auto p) __attribute__((always_inline)) {
        each<V>([&](auto k) __attribute__((always_inline)) {
          sums[p * V + k] += weights[p] * lanes::load(pixels + (p * across.stride * V + k) * count<A>);
        });
      });
    }
  each<PB * V>([&](auto at) __attribute__((always_inline)) {
    std::memcpy(it.result + at * count<A>, &sums[at], sizeof sums[at]);
  });
}

// The blocks of one kernel and stride, for V vectors of channels at once. If there are no unrolled blocks,
// the blocks for any kernel.
template <class T, class A, int V>
struct Blocks {
  using Run = void (*)(const Block<A>&);
  static constexpr int WIDE = widest<A>;

  const Axis& across;
  Run wide = nullptr, narrow = nullptr, one = nullptr;
  // Blocks at a side of the image, and blocks as wide as the image, which leave out the zeros beyond it.
  Run left = nullptr, right = nullptr, all_wide = nullptr, all_narrow = nullptr;

  explicit Blocks(const Axis& axis) : across(axis) {
    each<3>([&](auto size) {
      each<2>([&](auto step) {
        constexpr int K = 3 + 2 * size, S = 1 + step;
        if (across.kernel != K || across.stride != S || across.dilation != 1) return;
        wide = block<T, K, S, WIDE, V, false, false, A>, narrow = block<T, K, S, NARROW, V, false, false, A>;
        one = block<T, K, S, 1, V, false, false, A>;
        if constexpr (S == 1) {
          if (across.result != across.size) return;
          all_wide = block<T, K, S, WIDE, V, true, true, A>;
          all_narrow = block<T, K, S, NARROW, V, true, true, A>;
          if constexpr (V > 1)
            left = block<T, K, S, WIDE, V, true, false, A>, right = block<T, K, S, WIDE, V, false, true, A>;
        }
      });
    });
  }

  // True if lanes contain two rows of taps, and of the image.
  bool in_pairs() const { return paired<T> == 2 && wide; }

  // Number of pixels of a row that the next block computes.
  int64_t width(int64_t left) const {
    if (across.result < NARROW) return 1;
    return wide && across.result >= WIDE && left > NARROW ? WIDE : NARROW;
  }

  void run(const Block<A>& it, int64_t from, int64_t width, bool finite) const {
    const bool begins = from == 0, ends = from + width == across.result;
    Run side = nullptr;
    if (begins && ends) side = width == WIDE ? all_wide : width == NARROW ? all_narrow : nullptr;
    else if (width == WIDE) side = begins ? left : ends ? right : nullptr;
    if (finite && side) side(it);
    else if (wide) (width == WIDE ? wide : width == NARROW ? narrow : one)(it);
    else if (width == 1) block_of_any<1, V, A>(it, across);
    else block_of_any<NARROW, V, A>(it, across);
  }
};

// Initial values of the sums of a row. Rows of taps above and below the image are left out; there the
// reference multiplies weights with zeros, which gives nan for weights that are not finite.
template <class T, class A>
void begin_sums(const T* row, const View<const T, 6>& weight, const Span& inside, A* sums) {
  constexpr int L = count<A>;
  const int64_t size = weight.size(5), apart = weight.stride(5);
  std::fill(sums, sums + size, A(0));
  if (inside.first == 0 && inside.last == weight.size(2)) return;
  for (int64_t j = 0; j < size; j += L) {
    Vector<lanes::Bits<A>> largest{};
    for (int64_t u = 0; u < weight.size(2); u++) {
      if (u >= inside.first && u < inside.last) continue;
      for (int64_t v = 0; v < weight.size(3); v++) {
        const T* tap = row + u * weight.stride(2) + v * weight.stride(3) + j * apart;
        __builtin_prefetch(tap + weight.stride(4));
        Vector<A> taps{};
        if (apart == 1) {
          taps = size - j >= L ? lanes::load(tap) : lanes::load_some(tap, size - j);
        } else {
          for (int64_t lane = 0; lane < std::min<int64_t>(L, size - j); lane++)
            taps[lane] = A(tap[lane * apart]);
        }
        largest = lanes::larger<A>(largest, taps);
      }
    }
    const Vector<A> sum = lanes::infinite<A>(largest) ? all(std::numeric_limits<A>::quiet_NaN()) : all(A(0));
    lanes::store(sums + j, sum);  // as whole vectors: there is room for them
  }
}

// True if none of the weights of one group of one image is inf or nan; false also if they are not contiguous.
template <class T>
bool all_finite(const T* weights, const View<const T, 6>& weight) {
  using A = Computed<T>;
  constexpr int L = count<A>;
  int64_t size = 1;
  for (int at = 5; at >= 2; at--) {
    if (weight.stride(at) != size) return false;
    size *= weight.size(at);
  }
  Vector<lanes::Bits<A>> largest{};
  // First the weights before a multiple of a vector's size: loads across two cache lines take twice as long.
  int64_t at = std::min<int64_t>(size, -reinterpret_cast<uintptr_t>(weights) / sizeof(T) % L);
  largest = lanes::larger<A>(largest, lanes::load_some(weights, at));
  for (; at + L <= size; at += L) largest = lanes::larger<A>(largest, lanes::load(weights + at));
  largest = lanes::larger<A>(largest, lanes::load_some(weights + at, size - at));
  const Vector<lanes::Bits<A>> odd = lanes::infinite<A>(largest);
  for (int lane = 0; lane < L; lane++)
    if (odd[lane]) return false;
  return true;
}

// Sizes of the result; unknown for sizes that do not fit together, for which the reference raises an error.
template <class T>
Shape sizes(View<const T, 4> input, View<const T, 6> weight, List<int64_t> stride, List<int64_t> padding,
            List<int64_t> dilation) {
  fitted({input.size(2), weight.size(4), weight.size(2), stride[0], padding[0], dilation[0]},
         {input.size(3), weight.size(5), weight.size(3), stride[1], padding[1], dilation[1]}, input.size(1),
         weight.size(1));
  OPSMITH_CHECK(input.size(0) == weight.size(0), "the batches do not fit one another");
  return {input.size(0), input.size(1), weight.size(4), weight.size(5)};
}

constexpr int64_t SMALL = 1 << 16;  // bytes

// Plan of a call: the path for its steps, the size of a piece, and the scratch memory.
template <class T>
struct Plan {
  using A = Computed<T>;
  static constexpr int L = count<A>;

  Axis down, across;
  int64_t channels;  // of a group
  bool direct;       // weights are read without a copy
  bool streamed;     // results bypass the caches
  bool in_planes;    // the rest of the channels have planes, if they are few
  static constexpr int V = vectors_at_once<A>;
  Blocks<T, A, V> blocks{across};
  Blocks<T, A, 1> last_blocks{across};  // of the last vector of channels

  // Pixels of a band with zeros around them.
  int64_t columns = std::max(across.extent(across.result), across.size + across.padding);
  int64_t most = std::max<int64_t>(
      1, ((1 << 18) / int64_t(sizeof(A)) / (columns * V * L) - (down.kernel - 1) * down.dilation) /
             down.stride);
  int64_t band = std::min(most, down.result);
  int64_t together = rows_together<T>(band, across.result);
  int64_t tap_pitch = tap_pitch_of<A>(together * across.result);
  // Channels that fill vectors, or most of a vector; the few remaining channels have planes.
  int64_t in_vectors = in_planes ? channels / L * L : channels;
  FewLayout<A> few_layout{down, across, band};

  // Pixels of several vectors of channels, of one vector, and of few channels have separate memory, each with
  // zeros.
  int64_t last = in_vectors % (V * L);
  int64_t for_several = V > 1 && in_vectors > L ? pixels_of(V) : 0;
  int64_t for_one = V == 1 || (last > 0 && last <= L) ? pixels_of(1) : 0;
  int64_t for_few = in_vectors < channels ? few_layout.scratch() : 0;
  int64_t for_pixels = for_several + for_one + for_few;
  int64_t for_result = together * across.result * V * L;
  int64_t for_weights = direct ? 0 : down.kernel * across.kernel * tap_pitch;

  Plan(const Axes& axes, const View<const T, 4>& input, const View<const T, 6>& weight,
       const View<T, 4>& result)
      : down(axes.down),
        across(axes.across),
        channels(input.size(1) / weight.size(1)),
        direct(std::is_same_v<T, A> && weight.stride(5) == 1 &&
               weight.stride(3) * across.kernel == weight.stride(2)),
        streamed((input.numel() + weight.numel() + result.numel()) * int64_t(sizeof(T)) > LARGE),
        in_planes(channels % L <= few<A> && across.stride == 1 && weight.stride(5) == 1 &&
                  result.stride(3) == 1) {}

  // Numbers of the pixels of a band, of some vectors each.
  int64_t pixels_of(int64_t vectors) const { return down.extent(band) * columns * vectors * L; }
};

// Rows of the result that are computed one after the other, and their data.
template <class T, class A>
struct Turn {
  Span rows;
  const T* weights;  // of the group
  bool finite;       // true if all of these are known to be finite
  int64_t ahead;     // numbers to the weights that are used next
  A* widened;        // those of these rows, where they are not read as they lie
  A* begin;          // initial values of their sums
};

// Values common to all rows of a share: its weights, and, if these are few, a flag that all are finite.
template <class T, class A>
void take_weights(const Plan<T>& plan, const View<const T, 6>& weight, const Share& share, Turn<T, A>& turn) {
  turn.weights = weight.data + share.batch * weight.stride(0) + share.group * weight.stride(1);
  // In a small image nearly every row has taps beyond the image. One test of all weights is cheaper than a
  // test for each row, and reads them in the fastest order.
  const int64_t numbers = plan.down.kernel * plan.across.kernel * plan.down.result * plan.across.result;
  const bool small = numbers * int64_t(sizeof(T)) <= SMALL && share.last - share.first == plan.down.result;
  turn.finite = small && all_finite(turn.weights, weight);
  if (turn.finite) std::fill(turn.begin, turn.begin + plan.together * plan.across.result, A(0));
  // Then they are in a cache, and the weights of the next group are prefetched.
  turn.ahead = turn.finite ? numbers : (plan.direct ? 1 : plan.together) * weight.stride(4);
}

// Prepares the initial values of the sums of a turn, and copies its weights or makes pairs of them, as its
// path needs.
template <class T, class A>
void prepare(const Plan<T>& plan, const View<const T, 6>& weight, const Turn<T, A>& turn) {
  const Axis& down = plan.down;
  const int64_t first = turn.rows.first;
  if (!turn.finite)
    for (int64_t i = first; i < turn.rows.last; i++)
      begin_sums(turn.weights + i * weight.stride(4), weight, down.taps_of(i),
                 turn.begin + (i - first) * plan.across.result);
  auto rows_of = [&](int64_t u) {
    const Span inside = down.reached(u, {0, down.size}).within({0, down.result});
    return std::pair{inside.within(turn.rows), first};
  };
  const bool in_pairs = plan.blocks.in_pairs();
  if constexpr (paired<T> == 2)
    if (in_pairs) pair_rows(turn.weights, weight, rows_of, turn.ahead, turn.widened, plan.tap_pitch);
  if (!plan.direct && !in_pairs)
    widen_rows(turn.weights, weight, rows_of, turn.ahead, turn.widened, plan.tap_pitch);
}

// Computes the rows of a turn, of which `pixels` are the window of the first pixel.
template <int V, class T, class A>
void compute_rows(const Plan<T>& plan, const Blocks<T, A, V>& blocks, const View<const T, 6>& weight,
                  const Turn<T, A>& turn, const A* pixels, A* results) {
  constexpr int step = V * count<A>;  // from pixel to pixel
  const Axis &down = plan.down, &across = plan.across;
  const bool in_pairs = blocks.in_pairs();
  const int64_t size = across.result;
  const A* weights = turn.widened;
  int64_t weight_step = size;
  if constexpr (std::is_same_v<T, A>)
    if (plan.direct)
      weights = turn.weights + turn.rows.first * weight.stride(4), weight_step = weight.stride(4);
  Block<A> it;
  it.row_step = (in_pairs ? 2 : 1) * down.dilation * plan.columns * step;
  it.pitch = plan.direct ? weight.stride(3) : plan.tap_pitch;
  it.ahead = plan.direct ? turn.ahead : 0;
  for (int64_t i = turn.rows.first; i < turn.rows.last; i++) {
    const int64_t row = i - turn.rows.first;
    it.taps = down.taps_of(i);
    if (in_pairs) {
      const Span inside = it.taps;
      const bool any = inside.first < inside.last;
      it.odd = any && inside.last == down.kernel && inside.last % 2;
      it.taps = any ? Span{inside.first / 2, (inside.last + 1) / 2} : Span{0, 0};
    }
    for (int64_t at = 0; at < size;) {
      const int64_t width = blocks.width(size - at);
      const int64_t from = std::min(at, size - width);  // the last block may compute some pixels again
      it.pixels = pixels + (row * down.stride * plan.columns + from * across.stride) * step;
      it.weights = weights + row * weight_step + from;
      it.begin = turn.begin + row * size + from;
      it.result = results + (row * size + from) * step;
      blocks.run(it, from, width, turn.finite);
      at = from + width;
    }
  }
}

// Computes V vectors of channels, from one on.
template <int V, class T, class A>
void compute_channels(const Plan<T>& plan, const Blocks<T, A, V>& blocks, const View<const T, 4>& input,
                      const View<const T, 6>& weight, const Share& share, int64_t first, int64_t channels,
                      Turn<T, A>& turn, A* scratch, A* results, const View<T, 4>& result) {
  constexpr int L = count<A>;
  const Pixels<A> pixels{scratch, plan.columns, V * L};
  // Its rows of the image, and their place in scratch memory, which also has rows outside of the image.
  const Span window = plan.down.window({share.first, share.last});
  const Span image = Span{0, plan.down.size}.within(window);
  const Span inside{image.first - window.first, image.last - window.first};
  each<V>([&](auto k) {
    const int64_t some = std::min<int64_t>(L, channels - k * L);
    gather(planes(input, share.batch, first + k * L, some), image.first, image.last,
           Pixels<A>{pixels.at(inside.first, plan.across.padding) + k * L, plan.columns, V * L});
  });
  if constexpr (paired<T> == 2)
    if (blocks.in_pairs()) pair_rows_of_pixels(pixels, inside, plan.down.dilation);
  for (int64_t i = share.first; i < share.last; i += plan.together) {
    turn.rows = {i, std::min(i + plan.together, share.last)};
    prepare(plan, weight, turn);
    compute_rows<V>(plan, blocks, weight, turn, pixels.at((i - share.first) * plan.down.stride, 0), results);
    each<V>([&](auto k) {
      const Planes<T> out =
          planes(result, share.batch, first + k * L, std::min<int64_t>(L, channels - k * L));
      scatter(results + k * L, V * L, out, i, turn.rows.last, plan.streamed);
    });
  }
}

// As `involution` in operators.py.
template <class T>
void forward(View<const T, 4> input, View<const T, 6> weight, List<int64_t> stride, List<int64_t> padding,
             List<int64_t> dilation, View<T, 4> result) {
  using A = Computed<T>;
  constexpr int L = count<A>, V = vectors_at_once<A>;
  const Plan<T> plan(
      fitted({input.size(2), result.size(2), weight.size(2), stride[0], padding[0], dilation[0]},
             {input.size(3), result.size(3), weight.size(3), stride[1], padding[1], dilation[1]},
             input.size(1), weight.size(1)),
      input, weight, result);
  const int64_t in_all = plan.for_pixels + plan.for_result + plan.for_weights + plan.tap_pitch;
  in_shares<A>(
      input.size(0), weight.size(1), plan.down.result, plan.most, in_all, [&](const Share& share, A* scratch) {
        const int64_t group = share.group * plan.channels, left = plan.channels - plan.in_vectors;
        if (left > 0)
          forward_of_few(plan.few_layout, planes(input, share.batch, group + plan.in_vectors, left), weight,
                         share, scratch + plan.for_several + plan.for_one,
                         planes(result, share.batch, group + plan.in_vectors, left));
        if (plan.in_vectors == 0) return;
        A* const results = scratch + plan.for_pixels;
        Turn<T, A> turn;
        turn.widened = results + plan.for_result, turn.begin = turn.widened + plan.for_weights;
        take_weights(plan, weight, share, turn);
        for (int64_t at = 0; at < plan.in_vectors;) {
          const int64_t channels = std::min<int64_t>(V * L, plan.in_vectors - at), first = group + at;
          if (channels > L)
            compute_channels<V>(plan, plan.blocks, input, weight, share, first, channels, turn, scratch,
                                results, result);
          else
            compute_channels<1>(plan, plan.last_blocks, input, weight, share, first, channels, turn,
                                scratch + plan.for_several, results, result);
          at += channels;
        }
        lanes::settle();
      });
}
