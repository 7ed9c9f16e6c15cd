"""A package with kernels from files, which tests build and damage."""

from __future__ import annotations

import torch
from torch import Tensor

import opsmith


@opsmith.operator("scaled_package::scaled", shapes="x: N -> N")
def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    """Product of a vector and a number: x [N] -> [N]."""
    return x * by


@scaled.samples
def _(make: opsmith.Make) -> list[tuple[Tensor, float]]:
    return [(make(5), 3.0), (make(1), -1.0)]


scaled.kernel("cpu", cpp_file="scaled.cpp", libraries=["m"])
scaled.kernel("cuda", cuda_file="scaled.cu", grid="ceil(result.numel / 256)", block=256)


@opsmith.operator("scaled_package::shifted")
def shifted(x: Tensor) -> Tensor:
    """Sum of a vector and its length: x [N] -> [N]."""
    return x + x.shape[0]


@shifted.samples
def _(make: opsmith.Make) -> list[tuple[Tensor]]:
    return [(make(3),)]


shifted.kernel(
    "cuda",
    dtypes=[torch.float32],
    grid=1,
    block=64,
    constants={"N": "x.shape[0]"},
    cuda="""
template <class T, int N>
__launch_bounds__(128) __global__ void shifted(Contiguous<const T> x, Contiguous<T> y) {
  OPSMITH_EACH(i, x.numel()) y[i] = x[i] + T(N);
}
""",
)
