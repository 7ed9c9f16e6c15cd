"""A package whose kernel is wrong, which a verified build finds."""

from __future__ import annotations

from torch import Tensor

import opsmith


@opsmith.operator("wrong_package::squared")
def squared(x: Tensor) -> Tensor:
    return x * x


@squared.samples
def _(make: opsmith.Make) -> list[tuple[Tensor]]:
    return [(make(5),)]


squared.kernel(
    "cpu",
    cpp="""
template <class T> void squared(Contiguous<const T, 1> x, Contiguous<T, 1> y) {
  for (int64_t i = 0; i < x.numel(); i++) y.data[i] = x.data[i] * x.data[i] + T(i == 4);
}
""",
)
