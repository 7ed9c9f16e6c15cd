// Involution: each pixel of the result is the sum of the pixels around it, weighed by that pixel's own
// kernel. Where a processor multiplies pairs, a lane holds two rows of taps, or of the image.
#include "few_channels.h"
#include "pairs.h"

using namespace involution;

// Adds one row of taps to PB pixels that follow one another: K of them, S pixels from window to window. Each
// pixel of the image is loaded once, and each weight is multiplied with the channels of one.
// Of the last of an odd number of rows, pixels are `Alone`: without the row below.
template <class T, int K, int S, int PB, bool Alone, class A>
[[gnu::always_inline]] inline void add_row(Vector<A> (&sums)[PB], const A* pixels, const A* weights,
                                           int64_t pitch) {
  const A* taps[K];
  each<K>([&](auto v) __attribute__((always_inline)) {
    taps[v] = weights + v * pitch;
    lanes::keep(taps[v]);
  });
  each<(PB - 1) * S + K>([&](auto q) __attribute__((always_inline)) {
    Vector<A> pixel;
    std::memcpy(&pixel, pixels + q * count<A>, sizeof pixel);
    if constexpr (Alone) pixel = first_alone(pixel);
    each<K>([&](auto v) __attribute__((always_inline)) {
      constexpr int p = (q - v) / S;
      if constexpr (q >= v && (q - v) % S == 0 && p < PB) add_products<T>(sums[p], taps[v][p], pixel);
    });
  });
}

// What a block of pixels of one row needs.
template <class A>
struct Block {
  const A* pixels;   // the window of the first pixel, from row 0 of taps on
  int64_t row_step;  // numbers from a row of taps to the next, in the image
  const A* weights;  // of tap (0, 0), at the first pixel
  int64_t pitch;     // numbers from tap to tap
  Span taps;         // the rows of taps, or pairs of them, that are in the image
  bool odd = false;  // whether the last of these is no pair
  const A* begin;    // what the sums begin with
  A* result;
  int64_t ahead;  // numbers to the weights that are used next
};

template <class T, int K, int S, int PB, class A>
[[gnu::noinline]] void block(const Block<A>& it) {
  Vector<A> sums[PB];
  each<PB>([&](auto p) __attribute__((always_inline)) { sums[p] = all<A>(it.begin[p]); });
  const int64_t whole = it.taps.last - it.odd;
  for (int64_t u = it.taps.first; u < whole; u++) {
    const A* weights = it.weights + u * K * it.pitch;
    add_row<T, K, S, PB, false, A>(sums, it.pixels + u * it.row_step, weights, it.pitch);
    each<K>([&](auto v)
                __attribute__((always_inline)) { __builtin_prefetch(weights + v * it.pitch + it.ahead); });
  }
  if constexpr (paired<T> == 2) {
    const A* weights = it.weights + whole * K * it.pitch;
    if (it.odd) add_row<T, K, S, PB, true, A>(sums, it.pixels + whole * it.row_step, weights, it.pitch);
  }
  each<PB>([&](auto p) __attribute__((always_inline)) {
    std::memcpy(it.result + p * count<A>, &sums[p], sizeof sums[p]);
  });
}

// Any kernel, stride and dilation.
template <int PB, class A>
[[gnu::noinline]] void block_of_any(const Block<A>& it, const Axis& across) {
  Vector<A> sums[PB];
  each<PB>([&](auto p) __attribute__((always_inline)) { sums[p] = all<A>(it.begin[p]); });
  for (int64_t u = it.taps.first; u < it.taps.last; u++)
    for (int64_t v = 0; v < across.kernel; v++) {
      const A* weights = it.weights + (u * across.kernel + v) * it.pitch;
      const A* pixels = it.pixels + u * it.row_step + v * across.dilation * count<A>;
      each<PB>([&](auto p) __attribute__((always_inline)) {
        Vector<A> pixel;
        std::memcpy(&pixel, pixels + p * across.stride * count<A>, sizeof pixel);
        sums[p] += weights[p] * pixel;
      });
    }
  each<PB>([&](auto p) __attribute__((always_inline)) {
    std::memcpy(it.result + p * count<A>, &sums[p], sizeof sums[p]);
  });
}

// The unrolled blocks of one kernel and stride; all null where there are none.
constexpr int WIDE = 14, NARROW = 7;
template <class T, class A>
struct Blocks {
  void (*wide)(const Block<A>&) = nullptr;
  void (*narrow)(const Block<A>&) = nullptr;
  void (*one)(const Block<A>&) = nullptr;

  explicit Blocks(const Axis& across) {
    each<3>([&](auto size) {
      each<2>([&](auto step) {
        constexpr int K = 3 + 2 * size, S = 1 + step;
        if (across.kernel == K && across.stride == S && across.dilation == 1)
          wide = block<T, K, S, WIDE, A>, narrow = block<T, K, S, NARROW, A>, one = block<T, K, S, 1, A>;
      });
    });
  }

  // Whether lanes hold two rows of taps, and of the image.
  bool in_pairs() const { return paired<T> == 2 && wide; }

  void run(const Block<A>& it, const Axis& across, int64_t width) const {
    if (wide) (width == WIDE ? wide : width == NARROW ? narrow : one)(it);
    else if (width == 1) block_of_any<1, A>(it, across);
    else block_of_any<NARROW, A>(it, across);
  }
};

// Computes the pixels of some rows, of which `it` is the first block of the first. From the pixels of a row
// to those of the next lie `pixel_step` numbers, from its weights `weight_step`.
template <class T, class A>
void run_rows(const Blocks<T, A>& blocks, const Block<A>& it, int64_t pixel_step, int64_t weight_step,
              const Span& rows, const Axis& down, const Axis& across) {
  const int64_t size = across.result;
  const bool in_pairs = blocks.in_pairs();
  Block<A> here = it;
  for (int64_t i = rows.first; i < rows.last; i++) {
    const int64_t row = i - rows.first;
    here.taps = down.taps_of(i);
    if (in_pairs) {
      const Span inside = here.taps;
      const bool any = inside.first < inside.last;
      here.odd = any && inside.last == down.kernel && inside.last % 2;
      here.taps = any ? Span{inside.first / 2, (inside.last + 1) / 2} : Span{0, 0};
    }
    for (int64_t at = 0; at < size;) {
      const bool wide = blocks.wide && size >= WIDE && size - at > NARROW;
      const int64_t width = wide ? WIDE : size >= NARROW ? NARROW : 1;
      const int64_t from = std::min(at, size - width);  // the last block may compute some pixels again
      here.pixels = it.pixels + row * pixel_step + from * across.stride * count<A>;
      here.weights = it.weights + row * weight_step + from;
      here.begin = it.begin + row * size + from;
      here.result = it.result + (row * size + from) * count<A>;
      blocks.run(here, across, width);
      at = from + width;
    }
  }
}

// What the sums of a row begin with. Rows of taps above and below the image are left out; there the reference
// multiplies weights with zeros, which is nan where one is not finite.
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
    lanes::store(sums + j, sum);  // as whole vectors, for which there is room
  }
}

// Whether none of the weights of one group of one image is inf or nan; false also where they do not lie
// together.
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
  // First those before a multiple of a vector's size: loads across two lines of memory take twice as long.
  int64_t at = std::min<int64_t>(size, -reinterpret_cast<uintptr_t>(weights) / sizeof(T) % L);
  largest = lanes::larger<A>(largest, lanes::load_some(weights, at));
  for (; at + L <= size; at += L) largest = lanes::larger<A>(largest, lanes::load(weights + at));
  largest = lanes::larger<A>(largest, lanes::load_some(weights + at, size - at));
  const Vector<lanes::Bits<A>> odd = lanes::infinite<A>(largest);
  for (int lane = 0; lane < L; lane++)
    if (odd[lane]) return false;
  return true;
}

constexpr int64_t SMALL = 1 << 16;  // bytes

// What sizes fit one another is the reference's to say, in words of its own: this asks it where they do not.
template <class T>
Shape sizes(View<const T, 4> input, View<const T, 6> weight, List<int64_t> stride, List<int64_t> padding,
            List<int64_t> dilation) {
  fitted({input.size(2), weight.size(4), weight.size(2), stride[0], padding[0], dilation[0]},
         {input.size(3), weight.size(5), weight.size(3), stride[1], padding[1], dilation[1]}, input.size(1),
         weight.size(1));
  OPSMITH_CHECK(input.size(0) == weight.size(0), "the batches do not fit one another");
  return {input.size(0), input.size(1), weight.size(4), weight.size(5)};
}

// As `involution` in operators.py.
template <class T>
void forward(View<const T, 4> input, View<const T, 6> weight, List<int64_t> stride, List<int64_t> padding,
             List<int64_t> dilation, View<T, 4> result) {
  using A = Computed<T>;
  constexpr int L = count<A>;
  const Axes axes =
      fitted({input.size(2), result.size(2), weight.size(2), stride[0], padding[0], dilation[0]},
             {input.size(3), result.size(3), weight.size(3), stride[1], padding[1], dilation[1]},
             input.size(1), weight.size(1));
  const Axis down = axes.down, across = axes.across;
  const int64_t groups = weight.size(1), channels = input.size(1) / groups,
                taps = down.kernel * across.kernel;
  const bool direct =
      std::is_same_v<T, A> && weight.stride(5) == 1 && weight.stride(3) * across.kernel == weight.stride(2);
  const Blocks<T, A> blocks(across);
  const bool in_pairs = blocks.in_pairs();
  const bool streamed = (input.numel() + weight.numel() + result.numel()) * int64_t(sizeof(T)) > LARGE;

  // Scratch: pixels of a band with zeros around them; of some rows the result, the weights, what sums begin
  // with.
  const int64_t columns = std::max(across.extent(), across.size + across.padding);
  const int64_t most = std::max<int64_t>(
      1, ((1 << 18) / int64_t(sizeof(A)) / (columns * L) - (down.kernel - 1) * down.dilation) / down.stride);
  const int64_t band = std::min(most, down.result);
  const int64_t rows = (band - 1) * down.stride + (down.kernel - 1) * down.dilation + 1;
  const int64_t together = std::max<int64_t>(1, std::min(band, 512 / int64_t(sizeof(T)) / across.result));
  const int64_t wide = (together * across.result + 2 * L - 1) / L * L;
  // Channels that fill vectors, or most of one; what is left of few has its planes.
  const bool in_planes =
      channels % L <= few<A> && across.stride == 1 && weight.stride(5) == 1 && result.stride(3) == 1;
  const int64_t in_vectors = in_planes ? channels / L * L : channels;
  const FewLayout<A> few_layout(down, across, band);
  const int64_t for_pixels = std::max(rows * columns * L, few_layout.scratch());
  const int64_t for_result = together * across.result * L;
  const int64_t for_weights = direct ? 0 : taps * wide;
  in_shares<A>(
      input.size(0), groups, down.result, most, for_pixels + for_result + for_weights + wide,
      [&](const Share& share, A* scratch) {
        const int64_t group = share.group * channels;
        if (in_vectors < channels) {
          const int64_t first = group + in_vectors, left = channels - in_vectors;
          forward_of_few(few_layout, planes(input, share.batch, first, left), weight, share, scratch,
                         planes(result, share.batch, first, left));
        }
        if (in_vectors == 0) return;
        Pixels<A> pixels{scratch, columns};
        A *results = scratch + for_pixels, *widened = results + for_result, *begin = widened + for_weights;
        const T* weights = weight.data + share.batch * weight.stride(0) + share.group * weight.stride(1);
        const int64_t top = share.first * down.stride - down.padding;  // of the image: row 0 of pixels
        const int64_t bottom =
            (share.last - 1) * down.stride - down.padding + (down.kernel - 1) * down.dilation + 1;
        const int64_t from = std::clamp<int64_t>(top, 0, down.size),
                      to = std::clamp<int64_t>(bottom, from, down.size);
        for (int64_t row = from - top; row < to - top; row++) {  // those beyond the image are never read
          std::memset(pixels.at(row, 0), 0, across.padding * L * sizeof(A));
          std::memset(pixels.at(row, across.padding + across.size), 0,
                      (columns - across.padding - across.size) * L * sizeof(A));
        }
        // In a small image taps look beyond it from nearly every row. One look at all its weights is less
        // than one from each row, and reads them as memory is read fastest.
        const int64_t numbers = taps * down.result * across.result;
        const bool small = numbers * int64_t(sizeof(T)) <= SMALL && share.last - share.first == down.result;
        const bool finite = small && all_finite(weights, weight);
        if (finite) std::fill(begin, begin + together * across.result, A(0));
        // Then they are in a cache, and those of the next group are fetched meanwhile.
        const int64_t ahead = finite ? numbers : direct ? weight.stride(4) : together * weight.stride(4);
        for (int64_t channel = 0; channel < in_vectors; channel += L) {
          const int64_t some = std::min<int64_t>(L, in_vectors - channel), first = group + channel;
          Pixels<A> inner{pixels.at(from - top, across.padding), columns};
          gather(planes(input, share.batch, first, some), from, to, inner);
          if constexpr (paired<T> == 2) {
            const Span rows{from - top, to - top};
            if (in_pairs) pair_rows_of_pixels(pixels, rows, down.dilation);
          }
          const Planes<T> out = planes(result, share.batch, first, some);
          for (int64_t i = share.first; i < share.last; i += together) {
            const int64_t end = std::min(i + together, share.last);
            if (!finite)
              for (int64_t row = i; row < end; row++)
                begin_sums(weights + row * weight.stride(4), weight, down.taps_of(row),
                           begin + (row - i) * across.result);
            auto rows_of = [&](int64_t u) {
              const Span inside = down.reached(u, {0, down.size}).within({0, down.result});
              return std::pair{inside.within({i, end}), i};
            };
            if constexpr (paired<T> == 2) {
              if (in_pairs) pair_rows(weights, weight, rows_of, ahead, widened, wide);
              else widen_rows(weights, weight, rows_of, ahead, widened, wide);
            } else if (!direct) {
              widen_rows(weights, weight, rows_of, ahead, widened, wide);
            }
            Block<A> it;
            it.pixels = pixels.at(i * down.stride - down.padding - top, 0);
            it.row_step = (in_pairs ? 2 : 1) * down.dilation * columns * L;
            it.weights = widened;
            it.pitch = wide, it.ahead = 0;
            int64_t step = across.result;
            if constexpr (std::is_same_v<T, A>)
              if (direct) {
                it.weights = weights + i * weight.stride(4);
                it.pitch = weight.stride(3), step = weight.stride(4), it.ahead = ahead;
              }
            it.begin = begin;
            it.result = results;
            run_rows(blocks, it, down.stride * columns * L, step, Span{i, end}, down, across);
            scatter(results, out, i, end, streamed);
          }
        }
        lanes::settle();
      });
}
