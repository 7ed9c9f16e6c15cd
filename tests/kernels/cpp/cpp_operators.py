"""Operators with kernels in C++, of every kind of argument that there is."""

from __future__ import annotations

from typing import Any

import kernel_cases
import torch
from kernel_cases import declared
from torch import Tensor

import opsmith

scaled = declared(kernel_cases.scaled, "cpp_kernels")
scaled.kernel(
    "cpu",
    cpp=r"""
template <class T>
void scaled(Contiguous<const T> x, double by, std::optional<View<const T, 1>> shift, Contiguous<T> y) {
  OPSMITH_CHECK(by != 7.0, "`by` is %g, of all numbers", by);
  const int64_t n = x.numel();
#pragma omp parallel for simd if (n >= 32768)
  for (int64_t i = 0; i < n; i++) y[i] = T(float(x[i]) * float(by) + (shift ? float((*shift)(0)) : 0.0f));
}
""",
    dtypes=[torch.float32, torch.float16, torch.bfloat16],
)


row_sums = declared(kernel_cases.row_sums, "cpp_kernels")
row_sums.kernel(
    "cpu",
    cpp=r"""
template <class T>
void row_sums(View<const T, 2> x, View<T, 1> sums, View<int64_t, 1> counts) {
  for (int64_t i = 0; i < x.size(0); i++) {
    T sum = 0;
    int64_t count = 0;
    for (int64_t j = 0; j < x.size(1); j++) {
      sum += x(i, j);
      count += x(i, j) > 0;
    }
    sums(i) = sum;
    counts(i) = count;
  }
}
""",
)


channel_sums = declared(kernel_cases.channel_sums, "cpp_kernels")
channel_sums.kernel(
    "cpu",
    cpp=r"""
void channel_sums(ChannelsLast<const double> x, Contiguous<double, 4> y) {
  const int64_t channels = x.size(1), pixels = x.size(0) * x.size(2) * x.size(3);
  for (int64_t at = 0; at < pixels; at++) {
    double sum = 0;
    for (int64_t c = 0; c < channels; c++) sum += x.data[at * channels + c];
    y[at] = sum;
  }
}
""",
)


@opsmith.operator("cpp_kernels::told")
def told(
    x: Tensor,
    others: list[Tensor],
    sizes: list[int],
    weights: list[float],
    flags: list[bool],
    text: str,
    count: int,
    yes: bool,
    maybe: int | None = None,
    part: float | None = None,
    word: str | None = None,
) -> Tensor:
    """The values of every kind of argument, as numbers."""
    total = sum((other.sum() for other in others), start=x.new_zeros(()))
    numbers = [
        float(sum(sizes)),
        sum(weights),
        float(sum(flags)),
        float(len(text.encode()) + text.encode()[0]),
        float(count),
        float(yes),
        -1.0 if maybe is None else float(maybe),
        -1.0 if part is None else part,
        -1.0 if word is None else float(len(word)),
    ]
    return torch.cat([total[None], torch.tensor(numbers, dtype=x.dtype)])


@told.fake
def _(x: Tensor, *_others: Any, **_more: Any) -> Tensor:
    return x.new_empty(10)


told.kernel(
    "cpu",
    cpp=r"""
#include <numeric>

void told(View<const double> x, List<View<const double>> others, List<int64_t> sizes, List<double> weights,
          List<bool> flags, std::string_view text, int64_t count, bool yes, std::optional<int64_t> maybe,
          std::optional<double> part, std::optional<std::string_view> word, View<double, 1> result) {
  double sum = 0;
  for (const auto& other : others)
    for (int64_t at = 0; at < other.size(0); at++) sum += other(at);
  result(0) = sum;
  result(1) = double(std::accumulate(sizes.begin(), sizes.end(), int64_t(0)));
  result(2) = std::accumulate(weights.begin(), weights.end(), 0.0);
  result(3) = double(std::accumulate(flags.begin(), flags.end(), 0));
  result(4) = double(text.size()) + double((unsigned char)text[0]);
  result(5) = double(count);
  result(6) = double(yes);
  result(7) = maybe ? double(*maybe) : -1.0;
  result(8) = part ? *part : -1.0;
  result(9) = word ? double(word->size()) : -1.0;
}
""",
)
