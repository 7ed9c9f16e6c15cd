"""Classes as they are found in the wild: what torch's `apply` accepts, an adopted operator accepts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import InplaceFunction

import opsmith

wide = torch.float64


class Scaled(Function):
    """`setup_context` unpacks an argument that a call may leave out."""

    @staticmethod
    def forward(x: Tensor, factor: float = 3.0) -> Any:
        return x * factor, x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return grad * ctx.factor + _, None


def test_a_default_that_setup_context_unpacks() -> None:
    x = torch.randn(3, dtype=wide)
    scaled = opsmith.adopt(Scaled, "foreign::scaled", samples=lambda: [(x,), (x, 2.0)])
    assert torch.equal(scaled(x)[0], 3 * x)
    report = opsmith.check(Scaled, samples=[(x,), (x, 2.0)], only=["forward", "gradient"])
    assert report.passed, report


class Rounded(InplaceFunction):
    """Derived from torch's own class with an `__init__`, which `apply` never calls."""

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, scale: float = 2.0) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.scale, None


class Unused(Rounded):
    """Has an `__init__` that its methods cannot depend on."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_an_init_that_apply_never_calls() -> None:
    x = torch.randn(3, requires_grad=True)
    for function_class in (Rounded, Unused):
        operator = opsmith.adopt(function_class, f"foreign::{function_class.__name__}")
        operator(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((3,), 2.0))
        x.grad = None
