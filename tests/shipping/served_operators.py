"""Operators that a library serves without Python: one for every kind of argument and of result."""

from __future__ import annotations

import torch
from torch import Tensor

import opsmith


@opsmith.operator("served::scaled", shapes="x: ... N, shift: N -> ... N")
def scaled(x: Tensor, by: float = 2.0, shift: Tensor | None = None) -> Tensor:
    return x * by if shift is None else x * by + shift


scaled.kernel(
    "cpu",
    cpp=r"""
template <class T>
void scaled(Contiguous<const T> x, double by, std::optional<View<const T, 1>> shift, Contiguous<T> y) {
  OPSMITH_CHECK(by != 7.0, "`by` is %g, of all numbers", by);
  const int64_t n = x.size(-1);
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] * T(by) + (shift ? (*shift)(i % n) : T(0));
}
""",
)


@scaled.samples
def _(make: opsmith.Make):  # type: ignore[no-untyped-def]
    yield make(3, 4), 0.5, make(4)
    yield (make(2, 3, 5),)


@opsmith.operator("served::moments", hidden=("count",), results=("total", "most", "count"))
def moments(
    x: Tensor, *, offset: int = 0, absolute: bool = False, mode: str = "sum"
) -> tuple[Tensor, Tensor, Tensor]:
    taken = x[offset:].abs() if absolute else x[offset:]
    total = taken.mean(0) if mode == "mean" else taken.sum(0)
    return total.contiguous(), taken.max(0).values.contiguous(), torch.full((), len(taken))


moments.kernel(
    "cpu",
    cpp=r"""
std::array<Shape, 3> sizes(View<const float, 2> x, int64_t offset, bool, std::string_view) {
  OPSMITH_CHECK(offset < x.size(0), "offset %lld leaves no row", (long long)offset);
  if (offset < 0) return {Shape{x.size(1)}, Shape{-offset}, Shape{}};  // which is wrong
  return {Shape{x.size(1)}, Shape{x.size(1)}, Shape{}};
}

void moments(View<const float, 2> x, int64_t offset, bool absolute, std::string_view mode,
             View<float, 1> total, View<float, 1> most, View<int64_t, 0> count) {
  const int64_t rows = x.size(0) - offset;
  for (int64_t j = 0; j < x.size(1); j++) {
    float sum = 0, largest = 0;
    for (int64_t i = offset; i < x.size(0); i++) {
      const float value = absolute && x(i, j) < 0 ? -x(i, j) : x(i, j);
      sum += value;
      largest = i == offset || value > largest ? value : largest;
    }
    total(j) = mode == "mean" ? sum / float(rows) : sum;
    most(j) = largest;
  }
  *count.data = rows;
}
""",
)


@moments.samples
def _(make: opsmith.Make):  # type: ignore[no-untyped-def]
    yield make.call(make(3, 4))
    yield make.call(make(3, 5), offset=1, absolute=True, mode="mean")


@opsmith.operator("served::combined")
def combined(xs: list[Tensor], weights: list[float], rows: list[int], negated: list[bool]) -> Tensor:
    parts = [
        x[row] * (-weight if minus else weight)
        for x, weight, row, minus in zip(xs, weights, rows, negated, strict=True)
    ]
    return sum(parts[1:], parts[0]).contiguous()


combined.kernel(
    "cpu",
    cpp=r"""
Shape sizes(List<View<const float, 2>> xs, List<double>, List<int64_t>, List<bool>) {
  return {xs[0].size(1)};
}

void combined(List<View<const float, 2>> xs, List<double> weights, List<int64_t> rows, List<bool> negated,
              Contiguous<float, 1> sum) {
  for (int64_t j = 0; j < sum.numel(); j++) {
    float total = 0;
    for (int64_t at = 0; at < xs.size; at++)
      total += xs[at](rows[at], j) * float(negated[at] ? -weights[at] : weights[at]);
    sum[j] = total;
  }
}
""",
)


@combined.samples
def _(make: opsmith.Make):  # type: ignore[no-untyped-def]
    yield [make(3, 4), make(2, 4)], [0.5, 2.0], [2, 0], [False, True]


@opsmith.operator("served::increase_", mutates=["x"], returns="x", shapes="x: N M -> N M")
def increase_(x: Tensor, by: float = 1.0) -> Tensor:
    return x.add_(by)


increase_.kernel(
    "cpu",
    cpp=r"""
void increase_(Contiguous<float, 2> x, double by) {
  for (int64_t i = 0; i < x.numel(); i++) x[i] += float(by);
}
""",
    copies="allowed",
)


@opsmith.operator("served::add_into", mutates=["total"], shapes="total: N, x: N ->")
def add_into(total: Tensor, x: Tensor) -> None:
    total.add_(x)


add_into.kernel(
    "cpu",
    cpp=r"""
void add_into(Contiguous<float, 1> total, View<const float, 1> x) {
  for (int64_t i = 0; i < total.numel(); i++) total[i] += x(i);
}
""",
)


@opsmith.operator("served::doubled_channels", shapes="x: N C H W -> N C H W")
def doubled_channels(x: Tensor) -> Tensor:
    return (x * 2).contiguous()


doubled_channels.kernel(
    "cpu",
    cpp=r"""
void doubled_channels(ChannelsLast<const float> x, ChannelsLast<float> y) {
  for (int64_t i = 0; i < x.numel(); i++) y.data[i] = 2 * x.data[i];
}
""",
)


@opsmith.operator("served::narrow", shapes="x: N -> N")
def narrow(x: Tensor) -> Tensor:
    """Each of its kernels takes one dtype, and the name of one is a part of the other's."""
    return x.clone().contiguous()


for dtype in (torch.float16, torch.bfloat16):
    narrow.kernel(
        "cpu",
        cpp="""
template <class T>
void narrow(View<const T, 1> x, View<T, 1> y) {
  for (int64_t i = 0; i < x.size(0); i++) y(i) = x(i);
}
""",
        dtypes=[dtype],
    )
narrow.samples(lambda make: [(make(3),)])

EVERY = [scaled, moments, combined, increase_, add_into, doubled_channels, narrow]
