"""Cancellation in a formula is rounding; an error of the same size is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import Function

import opsmith


class Softmax(Function):
    """If one element of a row is nearly one, gradients are differences of much larger numbers."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = (x - x.amax(-1, keepdim=True)).exp()
        y = y / y.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


class SlightlyOff(Softmax):
    """A ten-billionth of a thousandth of the largest element is added everywhere."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        right = Softmax.backward(ctx, grad)
        return right + 1e-13 * right.abs().max()


class InSingle(Softmax):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        single = grad.float()
        return (y.float() * (single - (single * y.float()).sum(-1, keepdim=True))).to(grad.dtype)


class InHalf(Softmax):
    """Right in float64, and too coarse for float32."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        right = Softmax.backward(ctx, grad)
        return right.bfloat16().float() if grad.dtype == torch.float32 else right


def saturated(seed: int) -> Any:
    return 4 * torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_cancellation_in_another_formula_is_rounding(seed: int) -> None:
    report = opsmith.check(Softmax, samples=[(saturated(seed),)], only=["gradient"], seed=seed)
    assert report.passed_as_asked, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("wrong", [SlightlyOff, InSingle, InHalf])
def test_what_is_wrong_by_as_little_is_still_wrong(wrong: Any, seed: int) -> None:
    samples = [(saturated(seed),)]
    report = opsmith.check(wrong, samples=samples, only=["gradient"], effort="quick", seed=seed)
    assert {failure.input for failure in report.failures} == {"x"}
