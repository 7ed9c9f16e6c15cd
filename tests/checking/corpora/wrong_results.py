"""Operators with wrong results: kernels and fake kernels."""

from typing import Any

import torch
from mutants import square, wrong
from torch import Tensor

import opsmith


@wrong("forward", "kernel-mismatch", "result", "`result` from the kernel for cpu is wrong: at")
def kernel() -> Any:
    return square("kernel").kernel("cpu", lambda x: x * x + 1e-3)


@wrong("forward", "kernel-mismatch", "result", "it is the right tensor times 2")
def kernel_by_two() -> Any:
    return square("kernel_by_two").kernel("cpu", lambda x: 2 * x * x)


@wrong("forward", "precision", "result", "it consists of float16 numbers, so it was computed in float16")
def kernel_in_half_precision() -> Any:
    def half(x: Tensor) -> Tensor:
        return (x.to(torch.float16) * x.to(torch.float16)).to(x.dtype)

    return square("kernel_in_half_precision").kernel("cpu", half, dtypes=[torch.float32])


@wrong("forward", "kernel-mismatch", "rstd", "`rstd` from the kernel for cpu is wrong")
def kernel_hidden_result() -> Any:
    @opsmith.operator("wrong::kernel_hidden_result", results=("y", "rstd"), hidden=("rstd",))
    def rms_norm(x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = x.square().mean(-1, keepdim=True).rsqrt()
        return x * rstd, rstd

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = x.square().mean(-1, keepdim=True).rsqrt()
        return x * rstd, rstd + 0.25

    rms_norm.samples(lambda make: [(make(3, 4),)])
    return rms_norm.kernel("cpu", kernel)


@wrong(
    "forward",
    "shape",
    "result",
    "the shape of `result` differs from the shape of the reference",
)
def kernel_shape() -> Any:
    return square("kernel_shape").kernel("cpu", lambda x: (x * x).flatten())


@wrong(
    "forward", "dtype", "result", "the dtype torch.float64, but the reference returns the dtype torch.float32"
)
def kernel_dtype() -> Any:
    return square("kernel_dtype").kernel("cpu", lambda x: (x * x).to(torch.float64))


@wrong("forward", "raises", None, "RuntimeError: out of cheese")
def kernel_raises() -> Any:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("out of cheese")

    return square("kernel_raises").kernel("cpu", broken)


@wrong("forward", "not-exercised", None, "takes none of the samples (it does not take torch.float64)")
def kernel_that_takes_no_sample() -> Any:
    return square("kernel_that_takes_no_sample").kernel("cpu", lambda x: x * x, dtypes=[torch.int8])


@wrong(
    "fake",
    "fake-mismatch",
    "result",
    "the fake kernel gives `result` the shape [3, 5], but the real shape is [3, 4]",
)
def fake_shape() -> Any:
    operator = square("fake_shape")
    operator.fake(lambda x: x.new_empty(x.shape[0], x.shape[1] + 1))
    return operator


@wrong(
    "fake",
    "fake-mismatch",
    "result",
    "the fake kernel gives `result` the dtype torch.float32, but the real dtype is",
)
def fake_dtype() -> Any:
    operator = square("fake_dtype")
    operator.fake(lambda x: torch.empty_like(x, dtype=torch.float32))
    return operator


@wrong(
    "fake",
    "fake-mismatch",
    "result",
    "the fake kernel gives `result` the stride [1, 3], but the real stride is [4, 1]",
)
def fake_stride() -> Any:
    operator = square("fake_stride")
    operator.fake(lambda x: torch.empty_like(x.mT.contiguous()).mT)
    return operator


@wrong(
    "fake",
    "fake-mismatch",
    "result",
    "the fake kernel gives `result` the device meta, but the real device is cpu",
)
def fake_device() -> Any:
    operator = square("fake_device")
    operator.fake(lambda x: torch.empty_like(x, device="meta"))
    return operator


@wrong(
    "fake",
    "raises",
    None,
    "on fake tensors, which have a shape and a dtype but no data, the operator raises ",
)
def reference_looks_at_numbers() -> Any:
    @opsmith.operator("wrong::reference_looks_at_numbers")
    def shift(x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1

    shift.samples(lambda make: [(make(3),)])
    return shift


@wrong(
    "forward",
    "kernel-mismatch",
    "index",
    "`index` from the kernel for cpu is wrong: at [0] it is 1 where 0 is right",
)
def kernel_index() -> Any:
    @opsmith.operator("wrong::kernel_index", results={"values": ..., "index": opsmith.non_differentiable})
    def largest(x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = x.max(-1)
        return values, index

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = x.max(-1)
        return values, (index + 1) % x.shape[-1]

    largest.samples(lambda make: [(make(3, 4),)])
    return largest.kernel("cpu", kernel)


@wrong("forward", "raises", "result", "the shape of `result` differs from `shapes=`")
def declared_shape() -> Any:
    return square("declared_shape", shapes="x: B M -> B")


def listing(name: str) -> Any:
    @opsmith.operator(f"wrong::{name}")
    def split(x: Tensor) -> list[Tensor]:
        return [x.sin(), x.cos()]

    split.samples(lambda make: [(make(3, 4),)])
    return split


@wrong("forward", "shape", "result", "the length of `result` differs from the length of the reference")
def kernel_with_a_tensor_too_many() -> Any:
    return listing("kernel_with_a_tensor_too_many").kernel("cpu", lambda x: [x.sin(), x.cos(), x.tan()])


@wrong("forward", "shape", "result", "the length of `result` differs from the length of the reference")
def kernel_with_a_tensor_too_few() -> Any:
    return listing("kernel_with_a_tensor_too_few").kernel("cpu", lambda x: [x.sin()])


@wrong("forward", "shape", "halves", "the length of `halves` differs from the length of the reference")
def kernel_that_moves_a_tensor_to_another_list() -> Any:
    @opsmith.operator("wrong::kernel_that_moves_a_tensor", results=("halves", "rest"))
    def parts(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return [x.sin(), x.cos()], [x.tan()]

    parts.samples(lambda make: [(make(3, 4),)])
    return parts.kernel("cpu", lambda x: ([x.sin()], [x.cos(), x.tan()]))


@wrong(
    "fake",
    "fake-mismatch",
    "result",
    "on fake tensors it returns 3 tensors for `result`, and the reference 2",
)
def fake_with_a_tensor_too_many() -> Any:
    operator = listing("fake_with_a_tensor_too_many")
    operator.fake(lambda x: [torch.empty_like(x) for _ in range(3)])
    return operator
