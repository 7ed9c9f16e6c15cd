"""Cancellation in a formula is rounding; an error of the same size is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
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


def zeros(name: str) -> Any:
    """An operator whose gradient is zero but for rounding, and its sample."""
    operator = opsmith.operator(f"cancellation::{name}")
    drawn = torch.Generator().manual_seed(3)
    one = torch.randn(1, generator=drawn, dtype=torch.float64) * 8
    if name == "layer_norm":

        def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return torch.nn.functional.layer_norm(x, (1,), weight, bias)

        return operator(layer_norm), (one, one / 3, one / 7)

    def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_group_norm(x, weight, bias, 1, 6, 3, 2, 0.5)  # type: ignore[no-any-return]

    x, weight, bias = (torch.randn(1, 6, 3, generator=drawn, dtype=torch.float64) for _ in range(3))
    return operator(group_norm), (x, weight[0, :, 0], bias[0, :, 0])


@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
def test_a_gradient_that_is_zero_but_for_rounding_has_no_digits_to_compare(name: str) -> None:
    checked, sample = zeros(name)
    found = opsmith.check(
        checked, samples=[sample], only=["linearity", "forward_mode", "second_order", "vmap"], effort="quick"
    )
    assert not found.failures, found


class Clipped(Function):
    """Its gradient is not linear, and tiny."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return 1e-30 * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 1e-30 * grad.clamp(-1, 1)


def test_a_tiny_gradient_that_is_not_linear_is_found() -> None:
    (failure,) = opsmith.check(Clipped, samples=[(saturated(0),)], only=["linearity"]).failures
    assert failure.cause == "nonlinear-grad"
