// The gradient of involution by its input: each pixel is the sum of what came for the windows that it is in,
// weighed by their kernels.
//
// Where windows are S pixels apart, pixel x = S t + phase - padding is reached by taps v = phase, phase + S,
// ... alone, from windows t, t - 1, ... So each phase is like a gradient with windows one pixel apart, and
// every S-th tap.
#include "involution.h"

using namespace involution;

template <class A>
struct Block {
  const A* pixels;                        // what came for window t - (N - 1)
  const A* weights;                       // of that window, at the phase's first tap
  int64_t pitch;                          // numbers from one of the phase's taps to the next
  int64_t first, last;                    // of the windows from there on, those that there are
  int64_t rows, pixel_step, weight_step;  // of taps, and what to go from one to the next
  A* result;
  int64_t step, kept;  // numbers from one of its pixels to the next, and how many pixels there are
  int64_t ahead;       // numbers to the weights of the row below
};

// Adds what one row of taps brings to PB pixels that are S apart, for N taps.
template <int N, int PB, bool Inner, class A>
[[gnu::always_inline]] inline void add_row(Vector<A> (&sums)[PB], const Block<A>& it, const A* pixels,
                                           const A* weights) {
  const A* taps[N];
  each<N>([&](auto o) __attribute__((always_inline)) {
    taps[o] = weights + o * it.pitch;
    lanes::keep(taps[o]);
  });
  each<PB + N - 1>([&](auto q) __attribute__((always_inline)) {
    if (Inner || (q >= it.first && q < it.last)) {
      Vector<A> pixel;
      std::memcpy(&pixel, pixels + q * count<A>, sizeof pixel);
      each<N>([&](auto o) __attribute__((always_inline)) {
        constexpr int p = q + o - (N - 1);
        if constexpr (p >= 0 && p < PB) sums[p] += taps[o][q] * pixel;
      });
    }
  });
}

template <int N, int PB, bool Inner, class A>
[[gnu::noinline]] void block(const Block<A>& it) {
  Vector<A> sums[PB] = {};
  const A *pixels = it.pixels, *weights = it.weights;
  for (int64_t row = 0; row < it.rows; row++, pixels += it.pixel_step, weights += it.weight_step) {
    add_row<N, PB, Inner, A>(sums, it, pixels, weights);
    each<N>([&](auto o)
                __attribute__((always_inline)) { __builtin_prefetch(weights + o * it.pitch + it.ahead); });
  }
  each<PB>([&](auto p) __attribute__((always_inline)) {
    if (p < it.kept) std::memcpy(it.result + p * it.step, &sums[p], sizeof sums[p]);
  });
}

constexpr int WIDE = 14, NARROW = 7;

template <int N, class A>
void run(const Block<A>& it, int64_t width) {
  const bool inner = it.first <= 0 && it.last >= width + N - 1;
  if (width == WIDE) inner ? block<N, WIDE, true, A>(it) : block<N, WIDE, false, A>(it);
  else inner ? block<N, NARROW, true, A>(it) : block<N, NARROW, false, A>(it);
}

template <class A>
using Run = void (*)(const Block<A>&, int64_t);

// What computes a block with `taps` taps in a row; null where there is none for so many.
template <class A>
Run<A> run_of(int64_t taps) {
  static constexpr Run<A> known[] = {nullptr,   run<1, A>, run<2, A>, run<3, A>,
                                     run<4, A>, run<5, A>, nullptr,   run<7, A>};
  return taps >= 0 && taps < int64_t(std::size(known)) ? known[taps] : nullptr;
}

template <class T>
void input_gradient(View<const T, 4> cotangent, View<const T, 6> weight, List<int64_t> size,
                    List<int64_t> stride, List<int64_t> padding, List<int64_t> dilation, View<T, 4> result) {
  using A = Computed<T>;
  constexpr int L = count<A>;
  const Axis down{size[0], cotangent.size(2), weight.size(2), stride[0], padding[0], dilation[0]};
  const Axis across{size[1], cotangent.size(3), weight.size(3), stride[1], padding[1], dilation[1]};
  expect_fit(down, across, cotangent.size(1), weight.size(1));
  const int64_t groups = weight.size(1), channels = cotangent.size(1) / groups;
  const int64_t S = across.stride, K = across.kernel;
  const bool direct = std::is_same_v<T, A> && weight.stride(5) == 1;
  const bool streamed = (cotangent.numel() + weight.numel() + result.numel()) * int64_t(sizeof(T)) > LARGE;
  bool phased = down.dilation == 1 && across.dilation == 1;
  for (int64_t phase = 0; phase < std::min(S, K); phase++)
    phased = phased && run_of<A>((K - phase + S - 1) / S);

  const int64_t columns = across.result;
  const int64_t most = std::max<int64_t>(
      1, (1 << 18) / int64_t(sizeof(A)) / (columns * L) * down.stride - (down.kernel - 1) * down.dilation);
  const int64_t band = std::min(most, down.size);
  const int64_t rows = (band - 1 + (down.kernel - 1) * down.dilation) / down.stride + 2;
  const int64_t together = std::max<int64_t>(1, std::min(band, 512 / int64_t(sizeof(T)) / across.size));
  const int64_t wide = (together * across.result + 2 * L - 1) / L * L;
  const int64_t for_pixels = std::min(rows, down.result) * columns * L,
                for_result = together * across.size * L;
  const int64_t for_weights = direct ? 0 : down.kernel * K * wide;
  in_shares<A>(
      cotangent.size(0), groups, down.size, most, for_pixels + for_result + for_weights + L,
      [&](const Share& share, A* scratch) {
        const Pixels<A> pixels{scratch, columns};
        A *results = scratch + for_pixels, *widened = results + for_result;
        const T* weights = weight.data + share.batch * weight.stride(0) + share.group * weight.stride(1);
        // Rows of the cotangent that reach this share.
        const int64_t lowest = share.first + down.padding - (down.kernel - 1) * down.dilation;
        const int64_t from =
            lowest <= 0 ? 0 : std::min(down.result, (lowest + down.stride - 1) / down.stride);
        const int64_t to =
            std::clamp<int64_t>((share.last - 1 + down.padding) / down.stride + 1, from, down.result);
        for (int64_t channel = 0; channel < channels; channel += L) {
          const int64_t some = std::min<int64_t>(L, channels - channel),
                        first = share.group * channels + channel;
          gather(planes(cotangent, share.batch, first, some), from, to, pixels);
          const Planes<T> out = planes(result, share.batch, first, some);
          for (int64_t start = share.first; start < share.last; start += together) {
            const Span turn{start, std::min(start + together, share.last)};
            auto rows_of = [&](int64_t u) {
              const Span reached = down.reached(u, turn);
              return std::pair{reached.within({0, down.result}), reached.first};
            };
            const int64_t next = (together + down.stride - 1) / down.stride * weight.stride(4);
            if (!direct) widen_rows(weights, weight, rows_of, next, widened, wide);
            for (int64_t y = turn.first; y < turn.last; y++) {
              A* row = results + (y - start) * across.size * L;
              std::memset(row, 0, across.size * L * sizeof(A));
              // Taps u of this row, from the first on: those that reach a row i of the cotangent.
              auto row_at = [&](int64_t u) {
                const int64_t above = y + down.padding - u * down.dilation;
                return above >= 0 && above % down.stride == 0 && above / down.stride < down.result
                           ? above / down.stride
                           : -1;
              };
              int64_t first_tap = -1, rows_of_taps = 0;
              for (int64_t u = 0; u < down.kernel; u++) {
                if (row_at(u) < 0) continue;
                if (first_tap < 0) first_tap = u;
                rows_of_taps++;
              }
              auto taps_at = [&](int64_t u, int64_t i) -> const A* {
                if constexpr (std::is_same_v<T, A>)
                  if (direct) return weights + u * weight.stride(2) + i * weight.stride(4);
                return widened + u * K * wide + (i - down.reached(u, turn).first) * columns;
              };
              const int64_t pitch = direct ? weight.stride(3) : wide;
              if (rows_of_taps && phased) {
                const int64_t i = row_at(first_tap);
                const A* taps = taps_at(first_tap, i);
                for (int64_t phase = 0; phase < std::min(S, K); phase++) {
                  const int64_t N = (K - phase + S - 1) / S;
                  const int64_t begin = phase >= across.padding ? 0 : (across.padding - phase + S - 1) / S;
                  const int64_t reach = across.size + across.padding - phase;  // t S < reach
                  const int64_t end = reach <= 0 ? 0 : (reach + S - 1) / S;
                  for (int64_t at = begin; at < end;) {
                    const int64_t width = end - at > NARROW ? WIDE : NARROW;
                    const int64_t t = end - begin >= width ? std::min(at, end - width) : at;
                    Block<A> it;
                    it.pixels = pixels.at(i - from, t - (N - 1));
                    it.weights = taps + phase * pitch + (t - (N - 1));
                    it.pitch = S * pitch;
                    it.first = N - 1 - t, it.last = columns - (t - (N - 1));
                    it.rows = rows_of_taps, it.pixel_step = -columns * L;
                    it.weight_step =
                        direct ? down.stride * weight.stride(2) - weight.stride(4) : down.stride * K * wide;
                    it.result = row + (t * S + phase - across.padding) * L;
                    it.ahead = direct ? weight.stride(4) : 0;
                    it.step = S * L, it.kept = std::min(width, end - t);
                    run_of<A>(N)(it, width);
                    at = t + width;
                  }
                }
              } else if (rows_of_taps) {  // any dilation, and any number of taps: each tap by itself
                for (int64_t u = first_tap; u < down.kernel; u++) {
                  const int64_t i = row_at(u);
                  if (i < 0) continue;
                  const A* taps = taps_at(u, i);
                  for (int64_t v = 0; v < K; v++) {
                    const int64_t shift = v * across.dilation - across.padding;
                    for (int64_t j = 0; j < columns; j++) {
                      const int64_t x = j * S + shift;
                      if (x < 0 || x >= across.size) continue;
                      Vector<A> pixel, sum;
                      std::memcpy(&pixel, pixels.at(i - from, j), sizeof pixel);
                      std::memcpy(&sum, row + x * L, sizeof sum);
                      sum += taps[v * pitch + j] * pixel;
                      std::memcpy(row + x * L, &sum, sizeof sum);
                    }
                  }
                }
              }
            }
            scatter(results, out, turn.first, turn.last, streamed);
          }
        }
        lanes::settle();
      });
}
