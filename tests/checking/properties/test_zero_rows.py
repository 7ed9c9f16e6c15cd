"""The property `values` where a whole row of an input is zero, or all of it: a gradient is finite there."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


def values(checked: Any, **options: Any) -> Any:
    return opsmith.check(checked, only=["values"], **options).failures


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)


def project(grad: Tensor, x: Tensor, size: Tensor) -> Tensor:
    along = x / size
    return (grad - along * (grad * along).sum(-1, keepdim=True)) / size


class Unit(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return unit(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return project(grad, x, x.norm(dim=-1, keepdim=True))


class SafeUnit(Unit):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        size = x.norm(dim=-1, keepdim=True)
        small = size <= 1e-6
        return torch.where(small, grad / 1e-6, project(grad, x, size.masked_fill(small, 1.0)))


class Descending(Function):
    """Sorts by a permutation of its own: among equal elements each may take any of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        order = x.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        order = x.shape[-1] - 1 - order
        ctx.save_for_backward(order)
        return x.gather(-1, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, order, grad)


@pytest.mark.parametrize("effort", ["quick", "default"])
def test_a_gradient_is_finite_where_a_whole_row_is_zero(effort: Any) -> None:
    samples = [(torch.randn(3, 4),)]
    (failure,) = values(Unit, samples=samples, effort=effort)
    assert (failure.input, failure.cause) == ("x", "nan")
    assert failure.message.startswith(
        "the gradient of `x` is wrong where a row of `x` is 0: at [0, 0] it is nan where "
    )
    assert failure.evidence["values"] == "0 in a row of it"
    assert values(SafeUnit, samples=samples, effort=effort) == ()
    assert values(Descending, samples=samples, effort=effort) == ()


def test_all_of_a_reduced_input_may_be_zero() -> None:
    @opsmith.operator("zeros::half_energy")
    def operator(x: Tensor) -> Tensor:
        return x.square().sum() / 2

    operator.gradients(x=lambda grad, x: grad * x * x.square().sum() / x.square().sum())
    (failure,) = values(operator, samples=[(torch.randn(3, 4),)])
    assert (failure.cause, failure.evidence["values"]) == ("nan", "0 in all of it")
    assert "where all of `x` is 0: at [0, 0] it is nan where 0 is right" in failure.message
