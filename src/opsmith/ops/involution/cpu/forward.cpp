// Involution: each pixel of the result is the sum of the pixels around it, weighed by that pixel's own
// kernel.
#include "involution.h"

using namespace involution;

// Adds one row of taps to PB pixels that follow one another: K of them, S pixels from window to window. Each
// pixel of the image is loaded once, and each weight is multiplied with the channels of one.
template <int K, int S, int PB, class A>
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
    each<K>([&](auto v) __attribute__((always_inline)) {
      constexpr int p = (q - v) / S;
      if constexpr (q >= v && (q - v) % S == 0 && p < PB) sums[p] += taps[v][p] * pixel;
    });
  });
}

// What a block of pixels needs: see `forward`.
template <class A>
struct Block {
  const A* pixels;      // the first of the window of its first pixel, in row 0 of taps
  int64_t row_step;     // numbers from a row of taps to the next, in the image
  const A* weights;     // of tap (0, 0), at its first pixel
  int64_t pitch;        // numbers from tap to tap
  int64_t first, last;  // the rows of taps that are in the image
  const A* begin;       // what the sums begin with
  A* result;
  int64_t ahead;  // numbers to the weights of the row below
};

template <int K, int S, int PB, class A>
[[gnu::noinline]] void block(const Block<A>& it) {
  Vector<A> sums[PB];
  each<PB>([&](auto p) __attribute__((always_inline)) { sums[p] = all<A>(it.begin[p]); });
  for (int64_t u = it.first; u < it.last; u++) {
    const A* weights = it.weights + u * K * it.pitch;
    add_row<K, S, PB, A>(sums, it.pixels + u * it.row_step, weights, it.pitch);
    each<K>([&](auto v) __attribute__((always_inline)) {
      __builtin_prefetch(weights + v * it.pitch + it.ahead);
    });
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
  for (int64_t u = it.first; u < it.last; u++)
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

// What the sums of a row begin with. Rows of taps above and below the image are left out; there the reference
// multiplies weights with zeros, which is nan where one is not finite.
template <class T, class A>
void begin_sums(const T* row, const View<const T, 6>& weight, int64_t first, int64_t last, A* sums) {
  constexpr int L = count<A>;
  const int64_t size = weight.size(5), apart = weight.stride(5);
  std::fill(sums, sums + size, A(0));
  if (first == 0 && last == weight.size(2)) return;
  for (int64_t j = 0; j < size; j += L) {
    Vector<lanes::Bits<A>> largest{};
    for (int64_t u = 0; u < weight.size(2); u++) {
      if (u >= first && u < last) continue;
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
  int64_t at = 0;
  for (; at + L <= size; at += L) largest = lanes::larger<A>(largest, lanes::load(weights + at));
  largest = lanes::larger<A>(largest, lanes::load_some(weights + at, size - at));
  const Vector<lanes::Bits<A>> odd = lanes::infinite<A>(largest);
  for (int lane = 0; lane < L; lane++)
    if (odd[lane]) return false;
  return true;
}

constexpr int64_t SMALL = 1 << 16;  // bytes
constexpr int WIDE = 14, NARROW = 7;

// The pixels from `at` on that one block computes; it may begin before `at`, and compute some again.
template <class A>
int64_t next_block(Block<A> it, int64_t at, const Axis& across) {
  const int64_t left = across.result - at, size = across.result;
  int64_t width = left > NARROW && size >= WIDE ? WIDE : size >= NARROW ? NARROW : 1;
  const int64_t begin = std::min(at, size - width);
  it.pixels += begin * across.stride * count<A>;
  it.weights += begin;
  it.begin += begin;
  it.result += begin * count<A>;
  auto run = [&](auto K, auto S) {
    if (width == WIDE) block<K, S, WIDE, A>(it);
    else block<K, S, NARROW, A>(it);
  };
  const bool plain = across.dilation == 1 && width > 1;
  const int64_t K = across.kernel, S = across.stride;
  using lanes::Constant;
  if (plain && K == 3 && S == 1) run(Constant<3>{}, Constant<1>{});
  else if (plain && K == 5 && S == 1) run(Constant<5>{}, Constant<1>{});
  else if (plain && K == 7 && S == 1) run(Constant<7>{}, Constant<1>{});
  else if (plain && K == 3 && S == 2) run(Constant<3>{}, Constant<2>{});
  else if (plain && K == 5 && S == 2) run(Constant<5>{}, Constant<2>{});
  else if (plain && K == 7 && S == 2) run(Constant<7>{}, Constant<2>{});
  else if (width >= NARROW) block_of_any<NARROW, A>(it, across), width = NARROW;
  else block_of_any<1, A>(it, across);
  return begin + width;
}

// As `involution` in operators.py.
template <class T>
void forward(View<const T, 4> input, View<const T, 6> weight, List<int64_t> stride, List<int64_t> padding,
             List<int64_t> dilation, View<T, 4> result) {
  using A = Computed<T>;
  constexpr int L = count<A>;
  const Axis down{input.size(2), result.size(2), weight.size(2), stride[0], padding[0], dilation[0]};
  const Axis across{input.size(3), result.size(3), weight.size(3), stride[1], padding[1], dilation[1]};
  const int64_t groups = weight.size(1), channels = input.size(1) / groups,
                taps = down.kernel * across.kernel;
  const bool direct =
      std::is_same_v<T, A> && weight.stride(5) == 1 && weight.stride(3) * across.kernel == weight.stride(2);

  // Scratch: pixels of a band with zeros around them, rows of the result, the weights of a row, what sums
  // begin with.
  const int64_t columns = std::max(across.extent(), across.size + across.padding);
  const int64_t most = std::max<int64_t>(
      1, ((1 << 18) / int64_t(sizeof(A)) / (columns * L) - (down.kernel - 1) * down.dilation) / down.stride);
  const int64_t band = std::min(most, down.result);
  const int64_t rows = (band - 1) * down.stride + (down.kernel - 1) * down.dilation + 1;
  const int64_t batch_rows = std::max<int64_t>(1, std::min(band, 128 / across.result));
  const int64_t wide = (across.result + 2 * L - 1) / L * L;
  const int64_t for_pixels = rows * columns * L, for_result = batch_rows * across.result * L;
  const int64_t for_weights = direct ? 0 : taps * wide;
  in_shares<A>(
      input.size(0), groups, down.result, most, for_pixels + for_result + for_weights + wide,
      [&](const Share& share, A* scratch) {
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
        const int64_t held = taps * down.result * across.result * int64_t(sizeof(T));
        const bool small = held <= SMALL && share.last - share.first == down.result;
        const bool finite = small && all_finite(weights, weight);
        if (finite) std::fill(begin, begin + across.result, A(0));
        for (int64_t channel = 0; channel < channels; channel += L) {
          const int64_t some = std::min<int64_t>(L, channels - channel),
                        first = share.group * channels + channel;
          Pixels<A> inner{pixels.at(from - top, across.padding), columns};
          gather(planes(input, share.batch, first, some), from, to, inner);
          const Planes<T> out = planes(result, share.batch, first, some);
          int64_t waiting = share.first;  // the first row that is not written out
          for (int64_t i = share.first; i < share.last; i++) {
            const int64_t above = i * down.stride - down.padding;
            int64_t first_tap = 0, last_tap = down.kernel;
            while (first_tap < last_tap && above + first_tap * down.dilation < 0) first_tap++;
            while (last_tap > first_tap && above + (last_tap - 1) * down.dilation >= down.size) last_tap--;
            const T* row = weights + i * weight.stride(4);
            if (!finite) begin_sums(row, weight, first_tap, last_tap, begin);
            if (!direct)
              for (int64_t tap = first_tap * across.kernel; tap < last_tap * across.kernel; tap++) {
                const T* source =
                    row + tap / across.kernel * weight.stride(2) + tap % across.kernel * weight.stride(3);
                A* target = widened + tap * wide;
                widen(source, weight.stride(5), across.result, target, weight.stride(4));
              }
            Block<A> it;
            it.pixels = pixels.at(above - top, 0);
            it.row_step = down.dilation * columns * L;
            it.weights = widened;
            it.pitch = wide;
            if constexpr (std::is_same_v<T, A>) {
              if (direct) it.weights = row, it.pitch = weight.stride(3);
            }
            it.first = first_tap, it.last = last_tap, it.begin = begin;
            it.result = results + (i - waiting) * across.result * L;
            it.ahead = direct ? weight.stride(4) : 0;
            for (int64_t at = 0; at < across.result;) at = next_block(it, at, across);
            if (i + 1 - waiting == batch_rows || i + 1 == share.last) {
              scatter(results, out, waiting, i + 1);
              waiting = i + 1;
            }
          }
        }
      });
}
