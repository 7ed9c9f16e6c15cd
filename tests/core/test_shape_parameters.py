"""A formula that names `x_shape` gets the shape of `x`, and `x` is not saved for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith


def declared(name: str) -> opsmith.Operator[..., Any]:
    @opsmith.operator(name)
    def repeated(x: Tensor, count: Tensor | None = None) -> Tensor:
        return x.sum(-1, keepdim=True) * (2.0 if count is None else count)

    return repeated.gradients(
        x=lambda grad, count, x_shape: (grad * (2.0 if count is None else count)).expand(x_shape).clone(),
        count=lambda grad, x, count_shape: (grad * x.sum(-1, keepdim=True)).sum_to_size(count_shape),
    )


@pytest.mark.parametrize("calls", [1, 3], ids=["through-the-dispatcher", "through-the-front-door"])
def test_the_tensor_is_not_saved(name: str, calls: int) -> None:
    operator = declared(name)
    x = opsmith.Make()(2, 3).requires_grad_()
    saved: list[Tensor] = []
    for _ in range(calls):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            result = operator(x)
        assert saved == []
        (found,) = torch.autograd.grad(result.sum(), x)
        assert_close(found, torch.full_like(x, 2.0))


def test_every_order_and_mode(name: str) -> None:
    make = opsmith.Make()
    inputs = make(2, 3).requires_grad_(), make(2, 1).requires_grad_()
    operator = declared(name)
    assert torch.autograd.gradcheck(operator, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(operator, inputs, check_fwd_over_rev=True)


def test_under_vmap_it_is_the_shape_of_one_example(name: str) -> None:
    operator, make = declared(name), opsmith.Make()
    x, count = make(4, 2, 3), make(2, 1)
    per_example = torch.func.vmap(torch.func.grad(lambda x: operator(x, count).pow(2).sum()))
    plain = torch.func.vmap(torch.func.grad(lambda x: operator.reference(x, count).pow(2).sum()))
    assert_close(per_example(x), plain(x))


def test_an_argument_of_that_name_wins(name: str) -> None:
    @opsmith.operator(name)
    def scaled(x: Tensor, x_shape: float) -> Tensor:
        return x * x_shape

    scaled.gradients(x=lambda grad, x_shape: grad * x_shape)
    x = torch.ones(2, requires_grad=True)
    (found,) = torch.autograd.grad(scaled(x, 3.0).sum(), x)
    assert_close(found, torch.full((2,), 3.0))
