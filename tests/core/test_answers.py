"""Zero, non-differentiable and not implemented: three answers that are not a formula, each its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck
from torch.testing import assert_close

import opsmith
from opsmith import errors

Operator = opsmith.Operator[..., Any]


def blended(x: Tensor, y: Tensor) -> Tensor:
    return x**2 + torch.zeros_like(y) * y.detach()


def make_inputs() -> tuple[Tensor, Tensor]:
    make = opsmith.Make()
    return make(3).requires_grad_(), make(3).requires_grad_()


@pytest.fixture
def operator(name: str) -> Operator:
    return opsmith.operator(name)(blended).gradients(x=lambda grad, x: 2 * grad * x)


def test_zero_is_a_gradient(operator: Operator) -> None:
    operator.gradients(y=opsmith.zero)
    x, y = make_inputs()
    of_x, of_y = grad(operator(x, y).sum(), (x, y))
    assert_close((of_x, of_y), (2 * x.detach(), torch.zeros(3, dtype=torch.float64)))
    assert gradcheck(operator, (x, y), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(operator, (x, y))


def test_zero_alone_still_hangs_in_the_graph(operator: Operator) -> None:
    operator.gradients(y=opsmith.zero)
    x, y = make_inputs()
    result = operator(x.detach(), y)
    assert result.requires_grad
    assert_close(grad(result.sum(), y)[0], torch.zeros(3, dtype=torch.float64))


def test_zero_tangent(operator: Operator) -> None:
    operator.gradients(y=opsmith.zero)
    x, y = (value.detach() for value in make_inputs())
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(operator(x, forward_ad.make_dual(y, y))).tangent
    assert tangent is None or not tangent.any()


def test_non_differentiable_is_a_constant(operator: Operator) -> None:
    operator.gradients(y=opsmith.non_differentiable)
    x, y = make_inputs()
    assert not operator(x.detach(), y).requires_grad
    result = operator(x, y)
    assert result.requires_grad
    assert grad(result.sum(), (x, y), allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        grad(operator(x, y).sum(), y)
    assert gradcheck(lambda x: operator(x, y), (x,), check_forward_ad=True)


def test_non_differentiable_has_no_tangent(operator: Operator) -> None:
    operator.gradients(y=opsmith.non_differentiable)
    x, y = (value.detach() for value in make_inputs())
    with forward_ad.dual_level():
        result = operator(x, forward_ad.make_dual(y, y))
        assert forward_ad.unpack_dual(result).tangent is None


def test_not_implemented_hurts_only_who_needs_it(operator: Operator) -> None:
    operator.gradients(y=opsmith.not_implemented("nobody has written it"))
    x, y = make_inputs()
    assert_close(grad(operator(x, y.detach()).sum(), x)[0], 2 * x.detach())
    with torch.no_grad():
        assert_close(operator(x, y), x**2)
    result = operator(x, y)  # a forward alone needs no gradient
    with pytest.raises(errors.GradientNotImplementedError, match="nobody has written it"):
        result.sum().backward()


def test_integer_tensors_need_no_answer(name: str) -> None:
    def picked(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    operator = opsmith.operator(name)(picked).gradients(
        x=lambda grad, x_shape, index: grad.new_zeros(x_shape).index_add(0, index, grad)
    )
    x = make_inputs()[0]
    index = torch.tensor([0, 0, 2])
    assert gradcheck(lambda x: operator(x, index), (x,), check_forward_ad=True)
    assert gradgradcheck(lambda x: operator(x, index), (x,))


@pytest.mark.parametrize("answer", [opsmith.zero, opsmith.non_differentiable])
def test_answers_for_a_list(answer: Any, name: str) -> None:
    def first(xs: list[Tensor], weight: Tensor) -> Tensor:
        return weight * 2

    operator = opsmith.operator(name)(first).gradients(xs=answer, weight=lambda grad: 2 * grad)
    x, weight = make_inputs()
    of_x, of_weight = grad(operator([x, x], weight).sum(), (x, weight), allow_unused=True)
    assert_close(of_weight, torch.full((3,), 2.0, dtype=torch.float64))
    if answer is opsmith.zero:
        assert_close(of_x, torch.zeros(3, dtype=torch.float64))
    else:
        assert of_x is None


def test_answers_show_what_they_are() -> None:
    assert [repr(each) for each in (opsmith.zero, opsmith.non_differentiable)] == [
        "opsmith.zero",
        "opsmith.non_differentiable",
    ]
    assert repr(opsmith.not_implemented("why")) == "opsmith.not_implemented('why')"
    assert opsmith.not_implemented("why") == opsmith.not_implemented("why")
