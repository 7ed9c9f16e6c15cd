"""Operators that compute in float16 or float32 for every input are held to that precision and range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking import Outcome

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def product(dtype: torch.dtype, made: Callable[[Tensor, Tensor], Tensor] = lambda x, y: x) -> Any:
    """The product of two matrices; `made` is what becomes of it, given the first as it came."""

    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return made((x.to(dtype) @ y.to(dtype).mT).to(x.dtype), x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, y = (each.to(dtype) for each in ctx.saved_tensors)
            narrow = grad.to(dtype)
            return (narrow @ y).to(grad.dtype), (narrow.mT @ x).to(grad.dtype)

    return Product


def outcome(checked: Any, check: str, samples: list[Any]) -> Outcome:
    report = opsmith.check(checked, samples=samples, effort="quick", only=[check])
    return next(each for each in report.outcomes if each.property == check)


@pytest.mark.parametrize("size", [1e-3, 0.02, 1.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_narrow_range_is_not_held_to_a_wide_one(dtype: torch.dtype, size: float) -> None:
    found = outcome(product(dtype), "linearity", [(size * X, size * (X + 1))])
    assert found.status == "passed", found.failures


def spike(name: str, by: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def function(x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    operator = opsmith.operator(f"coarse::{name}")(function)
    return operator.surrogate_gradients(x=lambda grad, x: by(grad.half(), x.half()).to(grad.dtype))


def test_a_surrogate_in_float16_is_linear_to_its_digits() -> None:
    found = outcome(spike("smooth", lambda grad, x: grad / (1 + 9 * x.abs()) ** 2), "surrogate", [(X,)])
    assert found.status == "passed", found.failures


def test_a_surrogate_in_float16_that_clips_is_not_linear() -> None:
    found = outcome(spike("clipped", lambda grad, x: grad.clamp(-6, 6)), "surrogate", [(X,)]).failures
    (failure,) = [each for each in found if each.severity == "error"]
    assert failure.cause == "nonlinear-grad"
    assert "for 4 times a grad_output" in failure.message


def test_another_order_of_sums_in_float32_is_no_matter_of_layouts() -> None:
    found = outcome(product(torch.float32), "layouts", [(X, X + 1)])
    assert found.status == "passed", found.failures


def test_what_is_wrong_for_a_layout_in_float32_is_still_found() -> None:
    def off(y: Tensor, x: Tensor) -> Tensor:
        return y if x.is_contiguous() else y * (1 + 2.0**-16)

    (failure,) = outcome(product(torch.float32, off), "layouts", [(X, X + 1)]).failures
    assert (failure.cause, failure.input) == ("layout", "x")
