// The gradient of involution by its weight: at each pixel, the products of what came for it with the pixels
// of its window, summed over the channels of a group.
//
// Vectors are pixels of a row. Both tensors are first laid out channel by channel with zeros around each row;
// where windows are S pixels apart, every S-th pixel of the image stands together, so that all loads are of
// neighbours. Where a processor multiplies pairs, a row holds two channels: so there are half as many rows
// and products.
#include "pairs.h"

using namespace involution;

// Rows of a band, each with its channels, or pairs of them, one after the other.
template <class A>
struct Rows {
  A* data;
  int64_t layers, pitch;  // numbers from one of them to the next

  A* at(int64_t row, int64_t layer) const { return data + (row * layers + layer) * pitch; }
};

// Lays out a row of a channel, or of a pair of them: every `step`-th number, from a column on.
template <class T, class A = Computed<T>>
void lay_out(const Planes<const T>& from, int64_t layer, int64_t row, int64_t column, int64_t step,
             int64_t size, A* to) {
  const int64_t channel = layer * paired<T>, stride = step * from.column_stride;
  const T* first = from.at(channel, row, column);
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
  int64_t layers, kept;
  T* result;         // of the first tap, at the first pixel
  int64_t tap;       // numbers to the next tap
  int64_t next_row;  // and to the one that the next row of the cotangent has here
};

// One row of the image with R rows of the cotangent: K taps of each, windows S pixels apart.
template <int K, int S, int R, class A, class T>
[[gnu::noinline]] void block(const Block<A, T>& it) {
  Vector<A> sums[R * K] = {};
  const A *image = it.image, *cotangent = it.cotangent;
  for (int64_t layer = 0; layer < it.layers; layer++) {
    Vector<A> came[R];
    each<R>([&](auto r)
                __attribute__((always_inline)) { came[r] = lanes::load(cotangent + r * it.cotangent_row); });
    each<K>([&](auto v) __attribute__((always_inline)) {
      Vector<A> pixels = lanes::load(image + v % S * it.phases + v / S);
      lanes::loaded(pixels);
      each<R>([&](auto r)
                  __attribute__((always_inline)) { add_products<T>(sums[r * K + v], came[r], pixels); });
    });
    image += it.image_step, cotangent += it.cotangent_step;
  }
  const bool whole = it.kept >= count<A>;
  each<R>([&](auto r) __attribute__((always_inline)) {
    each<K>([&](auto v) __attribute__((always_inline)) {
      T* target = it.result + r * it.next_row + v * it.tap;
      if (whole) lanes::store(target, sums[r * K + v]);
      else lanes::store_some(target, sums[r * K + v], it.kept);
    });
  });
}

template <class A, class T>
using Run = void (*)(const Block<A, T>&);

// What computes K taps of 1, 2, ... rows of the cotangent at once; null behind the last.
template <int K, int S, class A, class T>
constexpr Run<A, T> runs[] = {block<K, S, 1, A, T>, block<K, S, 2, A, T>, block<K, S, 3, A, T>,
                              K < 7 ? block<K, S, (K < 7 ? 4 : 1), A, T> : nullptr, nullptr};
template <class A, class T>
constexpr Run<A, T> one[] = {block<1, 1, 1, A, T>, nullptr};

template <class A, class T>
const Run<A, T>* runs_of(int64_t kernel, int64_t stride, bool plain) {
  if (plain && stride == 1) {
    if (kernel == 3) return runs<3, 1, A, T>;
    if (kernel == 5) return runs<5, 1, A, T>;
    if (kernel == 7) return runs<7, 1, A, T>;
  }
  if (plain && stride == 2) {
    if (kernel == 3) return runs<3, 2, A, T>;
    if (kernel == 5) return runs<5, 2, A, T>;
    if (kernel == 7) return runs<7, 2, A, T>;
  }
  return one<A, T>;  // tap by tap, any of them
}

constexpr int ROWS = 2;  // so many times as many rows are gathered as are computed at once

template <class T>
void weight_gradient(View<const T, 4> cotangent, View<const T, 4> input, int64_t groups, List<int64_t> kernel,
                     List<int64_t> stride, List<int64_t> padding, List<int64_t> dilation,
                     Contiguous<T, 6> result) {
  using A = Computed<T>;
  constexpr int L = count<A>;
  const Axes axes =
      fitted({input.size(2), cotangent.size(2), kernel[0], stride[0], padding[0], dilation[0]},
             {input.size(3), cotangent.size(3), kernel[1], stride[1], padding[1], dilation[1]}, input.size(1),
             groups);
  const Axis down = axes.down, across = axes.across;
  const int64_t channels = input.size(1) / groups, S = across.stride, K = across.kernel;
  const int64_t layers = (channels + paired<T> - 1) / paired<T>;
  const Run<A, T>* run = runs_of<A, T>(K, S, down.dilation == 1 && across.dilation == 1);
  const int64_t at_once = run == one<A, T> ? 1 : K;  // taps
  int64_t several = 0;
  while (run[several]) several++;

  // A row: of the cotangent whole vectors, of the image as many in each phase, and what taps look further.
  auto odd_lines = [](int64_t numbers) {  // so that channels do not all fall on the same places of the cache
    const int64_t line = 64 / sizeof(A), lines = (numbers + line - 1) / line;
    return (lines | 1) * line;
  };
  const int64_t vectors = (across.result + L - 1) / L, reach = (K - 1) * across.dilation / S + 1;
  // Vectors are written whole, the last with zeros behind its end.
  const int64_t in_phase = vectors * L + reach + L;
  const int64_t image_pitch = odd_lines(in_phase * S), came_pitch = odd_lines(vectors * L);
  const int64_t each_row = layers * (image_pitch * down.stride + came_pitch);
  const int64_t most = std::max<int64_t>(
      1, (1 << 19) / int64_t(sizeof(A)) / each_row - (down.kernel - 1) * down.dilation / down.stride);
  const int64_t band = std::min(most, down.result);
  const int64_t rows = (band - 1) * down.stride + (down.kernel - 1) * down.dilation + 1;
  const int64_t for_image = rows * layers * image_pitch, for_came = band * layers * came_pitch;
  // A result that no cache holds is gathered here, as many rows of it as are computed together, and then
  // streamed.
  const int64_t taps = down.kernel * K, size = taps * down.result * across.result * result.size(0) * groups;
  const bool streamed = size * int64_t(sizeof(T)) > LARGE;
  const int64_t together = streamed ? ROWS * several : several;  // rows
  const int64_t run_pitch = (together * across.result + 2 * L - 1) / L * L;
  const int64_t for_result = streamed ? taps * run_pitch : 0;
  const int64_t in_all = for_image + for_came + for_result;
  in_shares<A>(input.size(0), groups, down.result, most, in_all, [&](const Share& share, A* scratch) {
    const Rows<A> image{scratch, layers, image_pitch}, came{scratch + for_image, layers, came_pitch};
    const Planes<const T> from = planes(input, share.batch, share.group * channels, channels);
    const Planes<const T> given = planes(cotangent, share.batch, share.group * channels, channels);
    T* const gathered = reinterpret_cast<T*>(scratch + for_image + for_came);
    std::memset(scratch, 0, (for_image + for_came) * sizeof(A));
    const int64_t top = share.first * down.stride - down.padding;
    const int64_t bottom = (share.last - 1) * down.stride - down.padding + (down.kernel - 1) * down.dilation;
    const int64_t highest = std::max<int64_t>(top, 0), lowest = std::min(bottom, down.size - 1);
    for (int64_t phase = 0; phase < S; phase++) {
      const int64_t begin = phase >= across.padding ? 0 : (across.padding - phase + S - 1) / S;
      const int64_t x = begin * S + phase - across.padding;
      const int64_t size =
          std::min(in_phase - L - begin, x < across.size ? (across.size - x + S - 1) / S : 0);
      if (size <= 0) continue;
      for (int64_t c = 0; c < layers; c++)  // planes from end to end, as memory is read fastest
        for (int64_t y = highest; y <= lowest; y++)
          lay_out(from, c, y, x, S, size, image.at(y - top, c) + phase * in_phase + begin);
    }
    for (int64_t c = 0; c < layers; c++)
      for (int64_t i = share.first; i < share.last; i++)
        lay_out(given, c, i, 0, 1, across.result, came.at(i - share.first, c));
    T* const results = result.data + share.batch * result.stride(0) + share.group * result.stride(1);
    for (int64_t start = share.first; start < share.last; start += together) {
      const int64_t end = std::min(start + together, share.last);
      // Where the results of row `start` go, and how far apart taps, rows of taps and rows are there.
      T* const target = streamed ? gathered : results + start * result.stride(4);
      const int64_t tap_step = streamed ? run_pitch : result.stride(3);
      for (int64_t tile = start; tile < end; tile += several) {
        const int64_t tall = std::min(several, end - tile);  // rows of the cotangent
        const int64_t apart = several > 1 ? down.stride : 0;
        // Row by row of the image: it is tap `at` of the tile's first row.
        for (int64_t at = 0; at < (tall - 1) * apart + down.kernel; at++) {
          const int64_t low = apart && at >= down.kernel ? (at - down.kernel) / apart + 1 : 0;
          const int64_t high = apart ? std::min(tall - 1, at / apart) : 0;
          if (low > high) continue;  // windows further apart than they are high
          const int64_t i = tile + low, u = at - low * apart;
          const int64_t y = i * down.stride + u * down.dilation - down.padding;
          for (int64_t j = 0; j < across.result; j += L) {
            Block<A, T> it;
            it.cotangent = came.at(i - share.first, 0) + j;
            it.cotangent_step = came_pitch, it.cotangent_row = layers * came_pitch;
            it.layers = layers, it.kept = streamed ? L : across.result - j;
            it.tap = tap_step, it.next_row = across.result - apart * K * tap_step;
            T* const first = target + u * K * tap_step + (i - start) * across.result + j;
            if (y < 0 ||
                y >= down.size) {  // the reference multiplies with zeros: nan where what came is not finite
              for (int64_t r = low; r <= high; r++) {
                const A* row = it.cotangent + (r - low) * it.cotangent_row;
                Vector<A> sum{};
                for (int64_t c = 0; c < layers; c++)
                  add_products<T>(sum, Vector<A>{}, lanes::load(row + c * came_pitch));
                for (int64_t v = 0; v < K; v++) {
                  T* tap = first + (r - low) * it.next_row + v * it.tap;
                  if (it.kept >= L) lanes::store(tap, sum);
                  else lanes::store_some(tap, sum, it.kept);
                }
              }
              continue;
            }
            it.image_step = image_pitch, it.phases = in_phase;
            for (int64_t v = 0; v < K; v += at_once) {
              const int64_t shift = v * across.dilation;
              it.image = image.at(y - top, 0) + shift % S * in_phase + shift / S + j;
              it.result = first + v * it.tap;
              run[high - low](it);
            }
          }
        }
      }
      if (!streamed) continue;
      for (int64_t tap = 0; tap < taps; tap++) {
        T* const to = results + tap * result.stride(3) + start * result.stride(4);
        lanes::stream(gathered + tap * run_pitch, to, (end - start) * across.result);
      }
    }
    lanes::settle();
  });
}
