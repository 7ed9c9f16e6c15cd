"""Operators that say of themselves that one call serves a batch, and are wrong."""

from typing import Any

from mutants import wrong
from torch import Tensor

import opsmith


@wrong("batching", "kernel-mismatch", "result", "batching='B' is wrong: in a batch of `x`")
def mixes_rows() -> Any:
    @opsmith.operator("wrong::mixes_rows", shapes="x: B M -> B M", batching="B")
    def mixes_rows(x: Tensor) -> Tensor:
        return x.softmax(0)

    mixes_rows.samples(lambda make: [(make(3, 4),)])
    return mixes_rows


@wrong("batching", "kernel-mismatch", "result", "batching='elementwise' is wrong: in a batch of `x`")
def not_elementwise() -> Any:
    @opsmith.operator("wrong::not_elementwise", batching="elementwise")
    def not_elementwise(x: Tensor) -> Tensor:
        return x - x.mean()

    not_elementwise.samples(lambda make: [(make(3, 4),)])
    return not_elementwise


@wrong("batching", "kernel-mismatch", "result", "batching='elementwise' is wrong: in a batch of `x`")
def over_the_last_dimension() -> Any:
    """Wrong for a batch in the last dimension alone."""

    @opsmith.operator("wrong::over_the_last_dimension", batching="elementwise")
    def over_the_last_dimension(x: Tensor) -> Tensor:
        return x.softmax(-1)

    over_the_last_dimension.samples(lambda make: [(make(3, 4),), (make(5),)])
    return over_the_last_dimension


@wrong("batching", "kernel-mismatch", "result", "batching='...' is wrong: in a batch of `x`")
def kernel_mixes_rows() -> Any:
    @opsmith.operator("wrong::kernel_mixes_rows", shapes="x: ... M -> ... M", batching="...")
    def kernel_mixes_rows(x: Tensor) -> Tensor:
        return x * 2

    def kernel(x: Tensor) -> Tensor:
        return x * 2 + (x.sum() if x.dim() > 2 else 0)

    kernel_mixes_rows.samples(lambda make: [(make(3, 4),)])
    return kernel_mixes_rows.kernel("cpu", kernel)


@wrong("batching", "raises", "result", "has no batch dimension, but it needs one with")
def reduces() -> Any:
    @opsmith.operator("wrong::reduces", batching="elementwise")
    def reduces(x: Tensor) -> Tensor:
        return x.sum()

    reduces.samples(lambda make: [(make(3, 4),)])
    return reduces
