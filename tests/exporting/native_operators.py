"""Operators with kernels in C++ of every form, for libraries of ONNX Runtime."""

from __future__ import annotations

import torch
from torch import Tensor

import opsmith


@opsmith.operator("native::scaled", shapes="x: ... -> ...")
def scaled(x: Tensor, by: float = 0.1, shift: Tensor | None = None) -> Tensor:
    y = x * by
    return y if shift is None else y + shift


scaled.kernel(
    "cpu",
    cpp="""
template <class T> T step(T x) { return x; }

template <class T>
void scaled(Contiguous<const T> x, double by, std::optional<Contiguous<const T>> shift, Contiguous<T> y) {
  OPSMITH_CHECK(x.numel() < 1000, "it takes fewer than %d numbers", 1000);
  if (x.numel() == 999) throw 1;
#pragma omp parallel for
  for (int64_t i = 0; i < x.numel(); i++) y[i] = step(x[i]) * T(by) + (shift ? (*shift)[i] : T(0));
}
""",
)


@opsmith.operator("native::repeated", results=("y", "counted"), hidden=("counted",))
def repeated(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """One result is hidden, and its size is a number of the caller's."""
    return (x * count).contiguous(), torch.arange(count)


repeated.kernel(
    "cpu",
    cpp="""
std::array<Shape, 2> sizes(View<const float, 1> x, int64_t count) { return {Shape{x.size(0)}, Shape{count}}; }

void repeated(View<const float, 1> x, int64_t count, View<float, 1> y, View<int64_t, 1> counted) {
  for (int64_t i = 0; i < x.size(0); i++) y(i) = x(i) * float(count);
  if (count < 100) for (int64_t i = 0; i < count; i++) counted(i) = i;
}
""",
)


@opsmith.operator("native::halved", shapes="x: ... -> ...")
def halved(x: Tensor) -> Tensor:
    """Its kernel has a function of the name and types of another's, which does something else."""
    return x / 2


halved.kernel(
    "cpu",
    cpp="""
template <class T> T step(T x) { return x / 2; }

template <class T>
void halved(Contiguous<const T> x, Contiguous<T> y) {
  for (int64_t i = 0; i < x.numel(); i++) y[i] = step(x[i]);
}
""",
)


@opsmith.operator("native::described", results=("y", "place"))
def described(
    xs: list[Tensor],
    weights: list[float],
    steps: list[int],
    flags: list[bool],
    word: str = "sum",
    count: int = 2,
    also: bool = True,
    missing: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Every kind of attribute, and two results of which one has another dtype; nothing tells their sizes."""
    y = sum(weight * x for weight, x in zip(weights, xs, strict=True)) + count + sum(steps) + sum(flags)
    y = y * 2 if word == "süm" else y
    y = y + 1 if also else y
    y = y if missing is None else y * missing
    return y.mT.contiguous(), y.argmax(-1)


described.kernel(
    "cpu",
    cpp="""
template <class T>
void described(List<View<const T, 2>> xs, List<double> weights, List<int64_t> steps, List<bool> flags,
               std::string_view word, int64_t count, bool also, std::optional<double> missing, View<T, 2> y,
               View<int64_t, 1> place) {
  T more = T(count);
  for (int64_t step : steps) more += T(step);
  for (bool flag : flags) more += T(flag);
  for (int64_t i = 0; i < y.size(1); i++) {
    place(i) = 0;
    for (int64_t j = 0; j < y.size(0); j++) {
      T sum = more;
      for (int64_t k = 0; k < xs.size; k++) sum += T(weights[k]) * xs[k](i, j);
      if (word == "süm") sum *= 2;
      if (also) sum += 1;
      if (missing) sum *= T(*missing);
      y(j, i) = sum;
      if (sum > y(place(i), i)) place(i) = j;
    }
  }
}
""",
)


@opsmith.operator("native::pooled", hidden=("largest",), results=("y", "largest"))
def pooled(x: Tensor, window: int | tuple[int, int] = 2) -> tuple[Tensor, Tensor]:
    """A kernel for channels that lie side by side, which tells sizes itself; one result is hidden."""
    height, width = window if isinstance(window, tuple) else (window, window)
    y = torch.nn.functional.avg_pool2d(x, (height, width))
    return y, y.amax((2, 3))


pooled.gradients(x=lambda grad, x: torch.zeros_like(x))
pooled.kernel(
    "cpu",
    cpp="""
#include <array>
template <class T>
std::array<Shape, 2> sizes(ChannelsLast<const T, 4> x, List<int64_t> window) {
  return {Shape{x.size(0), x.size(1), x.size(2) / window[0], x.size(3) / window[1]}, {x.size(0), x.size(1)}};
}

template <class T>
void pooled(ChannelsLast<const T, 4> x, List<int64_t> window, ChannelsLast<T, 4> y, View<T, 2> largest) {
  OPSMITH_CHECK(x.stride(1) == 1 && y.stride(1) == 1, "the channels do not lie side by side");
  for (int64_t b = 0; b < y.size(0); b++)
    for (int64_t c = 0; c < y.size(1); c++)
      for (int64_t i = 0; i < y.size(2); i++)
        for (int64_t j = 0; j < y.size(3); j++) {
          T sum = 0;
          for (int64_t u = 0; u < window[0]; u++)
            for (int64_t v = 0; v < window[1]; v++) sum += x(b, c, i * window[0] + u, j * window[1] + v);
          y(b, c, i, j) = sum / T(window[0] * window[1]);
          if (i + j == 0 || y(b, c, i, j) > largest(b, c)) largest(b, c) = y(b, c, i, j);
        }
}
""",
)


@opsmith.operator("native::joined")
def joined(x: Tensor, y: Tensor) -> Tensor:
    """The size of its result is an expression of several."""
    return torch.cat([x, y, x.flip(0)])


joined.kernel(
    "cpu",
    cpp="""
template <class T>
void joined(Contiguous<const T, 1> x, Contiguous<const T, 1> y, Contiguous<T, 1> z) {
  const int64_t n = x.size(0), m = y.size(0);
  for (int64_t i = 0; i < n; i++) z[i] = x[i], z[2 * n + m - 1 - i] = x[i];
  for (int64_t i = 0; i < m; i++) z[n + i] = y[i];
}
""",
    dtypes=[torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool],
)


@opsmith.operator("native::single", shapes="x: n -> n")
def single(x: Tensor) -> Tensor:
    """Its kernel takes float32 alone."""
    return x + 1


single.kernel(
    "cpu",
    cpp="""
void single(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  for (int64_t i = 0; i < x.size(0); i++) y[i] = x[i] + 1;
}
""",
)


@opsmith.operator("native::opaque", opaque=True, shapes="x: n -> n")
def opaque(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


opaque.kernel(
    "cpu",
    cpp="""
void opaque(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  for (int64_t i = 0; i < x.size(0); i++) y[i] = 2 * x[i];
}
""",
)


@opsmith.operator("native::rough", shapes="x: n -> n")
def rough(x: Tensor) -> Tensor:
    return x.exp()


rough.kernel(
    "cpu",
    cpp="""
void rough(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  for (int64_t i = 0; i < x.size(0); i++) y[i] = 1 + x[i];
}
""",
)


@opsmith.operator("native::nested")
def nested(x: Tensor) -> Tensor:
    """A reference without a kernel that calls operators with one."""
    return halved(scaled(x, 4.0)) + 1
