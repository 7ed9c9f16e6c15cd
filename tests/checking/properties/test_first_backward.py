"""Backwards that are wrong in the first run of a graph alone, or for some of the odd tensors together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith


class PackedOnce(torch.autograd.Function):
    """The first grad_output of a graph decides in which order a factor is packed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = None
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if ctx.factor is None:
            ctx.factor = 2 * ctx.saved_tensors[0]
            if grad.stride()[-1] > 1:
                ctx.factor = ctx.factor.flip(0)
        return ctx.factor * grad


class ClippedOnce(torch.autograd.Function):
    """The first grad_output of a graph decides which elements get a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mask = None
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if ctx.mask is None:
            ctx.mask = grad.abs() < 100
        return 2 * ctx.saved_tensors[0] * grad * ctx.mask


class IntoBuffer(torch.autograd.Function):
    """Every backward of a graph writes into one buffer; odd grad_outputs are read as if they were not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.buffer = torch.empty_like(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        read = grad if grad.is_contiguous() else grad.flip(0)
        return torch.mul(read, 2, out=ctx.buffer)


@pytest.mark.parametrize(
    ("function", "only", "cause"),
    [
        (PackedOnce, "layouts", "layout"),
        (ClippedOnce, "linearity", "nonlinear-grad"),
        (IntoBuffer, "layouts", "layout"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_first_backward_of_a_graph_is_looked_at(function: Any, only: str, cause: str) -> None:
    samples = lambda make: [(make(4, 8),), (make(3, 5),)]
    report = opsmith.check(function, samples=samples, only=[only], effort="quick")
    assert {failure.cause for failure in report.failures} == {cause}


def test_what_is_right_for_three_odd_tensors_may_be_wrong_for_two() -> None:
    @opsmith.operator("first_backward::fma")
    def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a * b + c

    @fma.kernel("cpu")
    def _(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        forgotten = c.is_contiguous() and not (a.is_contiguous() or b.is_contiguous())
        return a * b if forgotten else a * b + c

    fma.samples(lambda make: [(make(4, 8), make(4, 8), make(4, 8)), (make(3, 5), make(3, 5), make(3, 5))])
    report = opsmith.check(fma, only=["layouts"], effort="quick")
    assert {failure.cause for failure in report.failures} == {"layout"}
