"""A class that gives no gradient by an input, in no case, promises no second order by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


class SmoothedBackward(Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x, weight)
        return 2 * grad * x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, x, weight = ctx.saved_tensors
        return 2 * grads[0] * x * weight, 2 * grads[0] * grad * weight, None


class Smoothed(Function):
    """Right: `weight` is a constant of whoever calls it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return SmoothedBackward.apply(grads[0], *ctx.saved_tensors), None


class HalfBackward(SmoothedBackward):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, x, weight = ctx.saved_tensors
        return 2 * grads[0] * x * weight, None, None


class Half(Smoothed):
    """Its second order lacks what flows through `x`, too."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return HalfBackward.apply(grads[0], *ctx.saved_tensors), None


@pytest.mark.parametrize(("function", "severity"), [(Smoothed, "warning"), (Half, "error")])
def test_the_second_order_by_a_constant_input(function: Any, severity: str) -> None:
    samples = [(torch.rand(3, 4) + 0.5, torch.rand(3, 4) + 0.5)]
    report = opsmith.check(function, samples=samples, only=["second_order"])
    assert [each.severity for each in report.failures] == [severity], report
