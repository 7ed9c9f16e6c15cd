"""Operators with kernels in Triton, of every kind of parameter that there is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kernel_cases import EVERY
from torch import Tensor

import opsmith


def times_kernel(x_ptr, result_ptr, result_numel, by: tl.float64, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < result_numel)
    tl.store(result_ptr + at, x * by, mask=at < result_numel)


@opsmith.operator("triton_kernels::times")
def times(x: Tensor, by: float) -> Tensor:
    """Scale. In any number of dimensions, contiguous."""
    return x * by


@times.samples
def _(make: opsmith.Make):
    yield make(5, 7), 1.5
    yield make(3), -0.25


times.kernel(
    "cuda",
    triton=times_kernel,
    grid=lambda result, BLOCK: (triton.cdiv(result.numel(), BLOCK),),
    constants={"BLOCK": 64},
    dtypes=EVERY,
)


@triton.jit
def halved(x):
    return x * 0.5


@triton.jit
def softmax_kernel(x_ptr, result_ptr, x_size_1, x_stride_0, x_stride_1, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    there = column < x_size_1
    x = tl.load(x_ptr + row * x_stride_0 + column * x_stride_1, mask=there, other=-float("inf"))
    x = halved(x.to(tl.float32)) * 2
    e = tl.exp(x - tl.max(x, 0))
    tl.store(result_ptr + row * x_size_1 + column, e / tl.sum(e, 0), mask=there)


@opsmith.operator("triton_kernels::softmax")
def softmax(x: Tensor) -> Tensor:
    """Softmax of rows, which may have any strides; with a function that the kernel calls."""
    return x.softmax(1)


@softmax.samples
def _(make: opsmith.Make):
    yield make(4, 9)


softmax.kernel(
    "cuda",
    triton=softmax_kernel,
    grid=lambda x: x.shape[0],
    constants={"BLOCK": lambda x: triton.next_power_of_2(x.shape[1]), "num_warps": 2},
)


@triton.jit
def picked_kernel(x, index, shift, scale, flip, best, place, x_size_0, x_size_1, x_stride_0, x_stride_1):
    at = tl.program_id(0)
    row = tl.load(index + at)
    row = tl.where(row < 0, row + x_size_0, row)
    best_yet = tl.load(x + row * x_stride_0)
    place_yet = 0
    for column in range(1, x_size_1):
        here = tl.load(x + row * x_stride_0 + column * x_stride_1)
        place_yet = tl.where(here > best_yet, column, place_yet)
        best_yet = tl.where(here > best_yet, here, best_yet)
    found = best_yet * scale
    if shift is not None:
        found += tl.load(shift + at)
    if flip:
        found = -found
    tl.store(best + at, found)
    tl.store(place + at, place_yet)


@opsmith.operator("triton_kernels::picked", results={"best": ..., "place": opsmith.non_differentiable})
def picked(
    x: Tensor, index: Tensor, shift: Tensor | None = None, scale: int = 2, flip: bool = False
) -> tuple[Tensor, Tensor]:
    """The largest number of some rows and where it is: whole numbers, an option, two results."""
    best, place = x[index].max(1)
    best = best * scale if shift is None else best * scale + shift
    return -best if flip else best, place


@picked.samples
def _(make: opsmith.Make):
    yield make(4, 5), make.integers(6, high=4)
    yield make(4, 5), make.integers(6, high=4), make(6), 3, True


picked.kernel(
    "cuda", triton=picked_kernel, grid=lambda index: index.numel(), dtypes=[torch.float32, torch.float64]
)


@triton.jit
def product_kernel(
    a, b, result, a_size_0, a_size_1, b_size_1,
    a_stride_0, a_stride_1, b_stride_0, b_stride_1, result_stride_0, result_stride_1,
    TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, a_size_1, TILE):
        k = start + tl.arange(0, TILE)
        row = tl.load(
            a + i * a_stride_0 + k[None, :] * a_stride_1,
            mask=(i < a_size_0) & (k[None, :] < a_size_1),
            other=0.0,
        )
        column = tl.load(
            b + k[:, None] * b_stride_0 + j * b_stride_1,
            mask=(k[:, None] < a_size_1) & (j < b_size_1),
            other=0.0,
        )
        total = tl.dot(row, column, total, input_precision="ieee")
    there = (i < a_size_0) & (j < b_size_1)
    tl.store(result + i * result_stride_0 + j * result_stride_1, total, mask=there)


@opsmith.operator("triton_kernels::product")
def product(a: Tensor, b: Tensor) -> Tensor:
    """Product of matrices, by tiles, in any strides; its result has them too."""
    return a @ b


@product.samples
def _(make: opsmith.Make):
    yield make(5, 17), make(17, 3)


product.kernel(
    "cuda",
    triton=product_kernel,
    grid=lambda result, TILE: (triton.cdiv(result.shape[0], TILE), triton.cdiv(result.shape[1], TILE)),
    constants={"TILE": 16},
)


@triton.jit
def pixel_sums_kernel(x, result, x_size_1, result_numel, CHANNELS: tl.constexpr):
    pixel = tl.program_id(0)
    channel = tl.arange(0, CHANNELS)
    numbers = tl.load(x + pixel * x_size_1 + channel, mask=channel < x_size_1, other=0.0)
    tl.store(result + pixel, tl.sum(numbers.to(tl.float32), 0))


@opsmith.operator("triton_kernels::pixel_sums")
def pixel_sums(x: Tensor) -> Tensor:
    """Sum over channels, which the kernel wants to lie last."""
    return x.sum(1)


@pixel_sums.samples
def _(make: opsmith.Make):
    yield make(2, 3, 4, 5)


pixel_sums.kernel(
    "cuda",
    triton=pixel_sums_kernel,
    grid=lambda result: result.numel(),
    constants={
        "CHANNELS": lambda x: triton.next_power_of_2(max(x.shape[1], 1)),
        "x_size_1": lambda x: x.shape[1],
    },
    layouts={"x": "channels-last"},
)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 32}, num_warps=1), triton.Config({"BLOCK": 128}, num_warps=4)],
    key=["result_numel"],
)
@triton.heuristics({"EVEN": lambda given: given["result_numel"] % given["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x, result, result_numel, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(result + at, -tl.load(x + at))
    else:
        tl.store(result + at, -tl.load(x + at, mask=at < result_numel), mask=at < result_numel)


@opsmith.operator("triton_kernels::tuned")
def tuned(x: Tensor) -> Tensor:
    """Negate, in blocks of a size that is tuned."""
    return -x


@tuned.samples
def _(make: opsmith.Make):
    yield make(7, 9)
    yield make(64)


tuned.kernel("cuda", triton=tuned_kernel, grid=lambda result, BLOCK: triton.cdiv(result.numel(), BLOCK))

OPERATORS = {
    each.specification.short_name: each for each in (times, softmax, picked, product, pixel_sums, tuned)
}
