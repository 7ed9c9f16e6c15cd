"""Gradients of a class whose forward loses digits in torch's default dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


class Root(Function):
    """The square root of each number by Newton's method, in a buffer of the default dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = torch.ones(x.shape)
        for _ in range(20):
            root += 0.5 * (x / root - root)
        ctx.save_for_backward(root)
        return root.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return torch.div(grad, 2 * root)


class RootOff(Root):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.05 * Root.backward(ctx, grad)


class Settled(Function):
    """The state in which a recurrent network settles, and its implicit gradient; autograd sees no forward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor) -> Tensor:
        state = torch.zeros(1, len(bias))
        for _ in range(30):
            state = (state.to(bias) @ weight.detach() + bias.detach()).tanh().to(state.dtype)
        ctx.save_for_backward(weight, state)
        return state.to(bias.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, state = ctx.saved_tensors
        slope = 1 - state.to(grad).square()
        inner = torch.eye(len(weight)).to(grad) - weight * slope
        by_bias = slope * torch.linalg.solve(inner, grad.mT).mT
        return state.to(grad).mT @ by_bias, by_bias[0]


class SettledOff(Settled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_weight, by_bias = Settled.backward(ctx, grad)
        return 0.97 * by_weight, by_bias


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


ROOTS = [(drawn(3, 4).abs() + 0.5,), (drawn(2).abs() + 0.5,)]
SETTLED = [(0.2 * drawn(3, 3), drawn(3))]


@pytest.mark.parametrize(
    ("function", "samples"), [(Root, ROOTS), (Settled, SETTLED)], ids=["root", "settled"]
)
def test_a_right_gradient_passes_with_a_warning_about_digits(function: Any, samples: Any) -> None:
    report = opsmith.check(function, samples=samples, only=["forward", "gradient"], effort="quick")
    assert {(each.property, each.cause, each.severity) for each in report.failures} == {
        ("forward", "precision", "warning")
    }, report


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("function", "samples"), [(RootOff, ROOTS), (SettledOff, SETTLED)], ids=["root", "settled"]
)
def test_a_gradient_that_is_a_few_percent_off_is_an_error(function: Any, samples: Any) -> None:
    report = opsmith.check(function, samples=samples, only=["gradient"], effort="quick")
    (failure,) = report.failures
    assert failure.severity == "error"
    assert failure.input in ("x", "weight")
