"""Gradients that are wrong on purpose stay in force, and the reference's never replace them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, grad, gradcheck
from torch.testing import assert_close

import opsmith

Operator = opsmith.Operator[..., Any]


def spike(x: Tensor, threshold: float = 0.0) -> Tensor:
    return (x > threshold).to(x.dtype)


def soft(x: Tensor, threshold: float = 0.0) -> Tensor:
    return torch.sigmoid(4 * (x - threshold))


def slope(x: Tensor, threshold: float = 0.0) -> Tensor:
    value = x.detach().requires_grad_()
    return grad(soft(value, threshold).sum(), value)[0]


X = torch.tensor([-0.3, 0.2, 0.9], dtype=torch.float64)


def test_formula(name: str) -> None:
    operator = opsmith.operator(name)(spike).surrogate_gradients(x=lambda grad: grad)
    x = X.clone().requires_grad_()
    assert_close(operator(x).detach(), spike(X))
    assert_close(grad(operator(x).sum(), x)[0], torch.ones_like(X))


@pytest.mark.parametrize("kernel", [False, True], ids=["", "kernel"])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_stand_in(kernel: bool, threshold: float, name: str) -> None:
    operator = opsmith.operator(name)(spike).surrogate_gradients(soft)
    if kernel:
        operator.kernel("cpu", spike)
    x = X.clone().requires_grad_()
    assert_close(operator(x, threshold).detach(), spike(X, threshold))
    assert_close(grad(operator(x, threshold).sum(), x)[0], slope(X, threshold))


def test_formula_beside_a_stand_in(name: str) -> None:
    """The formula is in force where it is given; the stand-in serves the other input."""

    def gate(x: Tensor, y: Tensor) -> Tensor:
        return (x > 0) * y.round()

    def smooth(x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(x) * y

    operator = opsmith.operator(name)(gate).surrogate_gradients(smooth, x=lambda grad: 5 * grad)
    x, y = X.clone().requires_grad_(), X.cos().requires_grad_()
    of_x, of_y = grad(operator(x, y).sum(), (x, y))
    assert_close(of_x, torch.full_like(X, 5.0))
    assert_close(of_y, torch.sigmoid(X))


def test_second_order_is_that_of_the_stand_in(name: str) -> None:
    def twice(function: Any) -> Tensor:
        x = X.clone().requires_grad_()
        (first,) = grad(function(x).sum(), x, create_graph=True)
        return grad(first.pow(2).sum(), x)[0]

    assert_close(twice(opsmith.operator(name)(spike).surrogate_gradients(soft)), twice(soft))


def test_forward_mode_is_that_of_the_surrogate(name: str) -> None:
    for operator, expected in (
        (opsmith.operator(name)(spike).surrogate_gradients(soft), slope(X)),
        (opsmith.operator(f"{name}_formula")(spike).surrogate_gradients(x=lambda grad: 3 * grad), 3.0),
    ):
        with forward_ad.dual_level():
            dual = operator(forward_ad.make_dual(X, X.cos()))
            assert_close(forward_ad.unpack_dual(dual).tangent, X.cos() * expected)


def test_gradcheck_tells_it_from_the_truth(name: str) -> None:
    operator = opsmith.operator(name)(spike).surrogate_gradients(soft)
    assert not gradcheck(operator, (X.clone().requires_grad_(),), raise_exception=False)


def test_gradient_reversal(name: str) -> None:
    def same(x: Tensor) -> Tensor:
        return x.clone()

    operator = opsmith.operator(name)(same).surrogate_gradients(x=lambda grad: -grad)
    x = X.clone().requires_grad_()
    assert_close(grad(operator(x).sum(), x)[0], -torch.ones_like(X))
    (first,) = grad((operator(x) ** 2).sum(), x, create_graph=True)
    assert_close(grad(first.sum(), x)[0], torch.full_like(X, 2.0))


def test_stand_in_with_hidden_results_returns_the_visible_ones(name: str) -> None:
    def coded(x: Tensor) -> tuple[Tensor, Tensor]:
        code = x.round()
        return code * 2, code

    def smooth(x: Tensor) -> Tensor:
        return 2 * x.sin()

    operator = opsmith.operator(name, hidden=("code",))(coded).surrogate_gradients(smooth)
    x = X.clone().requires_grad_()
    assert_close(grad(operator(x).sum(), x)[0], 2 * X.cos())


def test_answers(name: str) -> None:
    def chosen(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x.round() + y + z

    operator = opsmith.operator(name)(chosen).surrogate_gradients(
        x=lambda grad: grad, y=opsmith.zero, z=opsmith.non_differentiable
    )
    x, y, z = (X.clone().requires_grad_() for _ in range(3))
    found = grad(operator(x, y, z).sum(), (x, y, z), allow_unused=True)
    assert_close(found[:2], (torch.ones_like(X), torch.zeros_like(X)))
    assert found[2] is None
