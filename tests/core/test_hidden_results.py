"""Hidden results: formulas see them, callers do not, and any order of derivative goes through them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.testing import assert_close

import opsmith

Operator = opsmith.Operator[..., Any]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, N], weight [N], bias [N] -> [B, N], with mean [B, 1] and rstd [B, 1]."""
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (x - mean) * rstd * weight + bias, mean, rstd


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


def gradient_of_x(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    normal = (x - mean) * rstd
    scaled = grad * weight
    return rstd * (scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True))


def declared(name: str, *formulas: str) -> Operator:
    known = {
        "x": gradient_of_x,
        "weight": lambda grad, x, mean, rstd: grad * (x - mean) * rstd,
        "bias": lambda grad: grad,
    }
    operator = opsmith.operator(name, hidden=("mean", "rstd"))(layer_norm)
    return operator.gradients(**{each: known[each] for each in formulas})


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    make = opsmith.Make()
    return make(2, 3).requires_grad_(), make(3).requires_grad_(), make(3).requires_grad_()


WAYS = [("x", "weight", "bias"), ("x",), ("weight", "bias"), ()]
IDS = ["all", "x", "weight-and-bias", "none"]


@pytest.mark.parametrize("formulas", WAYS, ids=IDS)
def test_callers_see_one_result(formulas: tuple[str, ...], name: str) -> None:
    operator = declared(name, *formulas)
    result = operator(*inputs())
    assert isinstance(result, Tensor)
    assert_close(result, plain(*inputs()))
    namespace, _, short = name.partition("::")
    assert_close(getattr(getattr(torch.ops, namespace), short)(*inputs()), result)
    assert len(getattr(getattr(torch.ops, namespace), f"{short}_and_hidden")(*inputs())) == 3


@pytest.mark.parametrize("formulas", WAYS, ids=IDS)
def test_first_and_second_order(formulas: tuple[str, ...], name: str) -> None:
    operator = declared(name, *formulas)
    assert gradcheck(operator, inputs(), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(operator, inputs(), check_fwd_over_rev=True)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (True, False, True)])
def test_second_order_in_some_inputs(needs: tuple[bool, ...], name: str) -> None:
    operator = declared(name, "x", "weight", "bias")
    some = tuple(value.detach().requires_grad_(need) for value, need in zip(inputs(), needs, strict=True))
    assert gradgradcheck(operator, some, check_fwd_over_rev=needs[0] and not needs[2])


def test_third_order(name: str) -> None:
    def third(function: Any) -> Any:
        args = inputs()
        (first,) = grad(function(*args).pow(3).sum(), args[0], create_graph=True)
        (second,) = grad(first.pow(2).sum(), args[0], create_graph=True)
        return grad(second.pow(2).sum(), args[:2])

    # Not against torch.nn.functional.layer_norm, whose own third order is wrong.
    assert_close(third(declared(name, "x", "weight", "bias")), third(lambda *args: layer_norm(*args)[0]))


def test_formula_that_takes_the_gradient_of_its_hidden_result(name: str) -> None:
    """An opaque operator whose author writes the way through the hidden result himself."""

    def routine(x: Tensor) -> tuple[Tensor, Tensor]:
        root = torch.from_numpy(x.detach().numpy() ** 0.5)
        return 2 * root, root

    operator = opsmith.operator(name, opaque=True, hidden=("root",))(routine).gradients(
        x=lambda grad, grad_root, root: grad / root + grad_root / (2 * root)
    )
    x = torch.tensor([1.0, 4.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(operator, (x,))
    assert gradgradcheck(operator, (x,))


def test_hidden_result_that_is_not_differentiable(name: str) -> None:
    """A mask hangs from its input, and no gradient flows through it: the second order is zero, as said."""

    def relu(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (x > 0).to(x.dtype)
        return x * mask, mask

    operator = opsmith.operator(
        name, results={"y": ..., "mask": opsmith.non_differentiable}, hidden=("mask",)
    )(relu)
    operator.gradients(x=lambda grad, mask: grad * mask)
    x = torch.tensor([-1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(operator, (x,), check_forward_ad=True)
    assert gradgradcheck(operator, (x,), check_fwd_over_rev=True)
    assert operator.explain(x).saved == ("mask",)


def test_hidden_result_of_whole_numbers(name: str) -> None:
    def largest(x: Tensor) -> tuple[Tensor, Tensor]:
        found = x.max(-1)
        return found.values, found.indices

    operator = opsmith.operator(name, hidden=("where",))(largest).gradients(
        x=lambda grad, x, where: torch.zeros_like(x).scatter(-1, where.unsqueeze(-1), grad.unsqueeze(-1))
    )
    x = opsmith.Make()(3, 4).requires_grad_()
    assert operator(x).dtype is torch.float64
    assert gradcheck(operator, (x,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(operator, (x,))


def test_hidden_result_between_visible_ones(name: str) -> None:
    def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x**2, x.exp(), x**3

    operator = opsmith.operator(name, results=("square", "growth", "cube"), hidden=("growth",))(
        three
    ).gradients(
        x=lambda grad_square, grad_cube, x, growth: 2 * x * grad_square + 3 * x**2 * grad_cube + 0 * growth
    )
    x = opsmith.Make()(2).requires_grad_()
    square, cube = operator(x)
    assert_close(square, x**2)
    assert_close(cube, x**3)
    assert gradcheck(operator, (x,), check_forward_ad=True)
    assert gradgradcheck(operator, (x,), check_fwd_over_rev=True)


def test_hidden_result_of_a_kernel_is_what_formulas_see(name: str) -> None:
    def reference(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x * 0

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), torch.full_like(x, 7.0)

    operator = opsmith.operator(name, hidden=("mark",))(reference).kernel("cpu", kernel)
    operator.gradients(x=lambda grad, mark: grad * mark)
    x = torch.zeros(2, requires_grad=True)
    (gradient,) = grad(operator(x).sum(), x)
    assert_close(gradient, torch.full((2,), 7.0))
