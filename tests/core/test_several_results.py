"""Several results, with names, roles and dtypes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.testing import assert_close

import opsmith


def polar(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x [N], y [N] -> radius [N], angle [N]."""
    return torch.hypot(x, y), torch.atan2(y, x)


def inputs() -> tuple[Tensor, Tensor]:
    make = opsmith.Make()
    return make(3).requires_grad_(), make(3).requires_grad_()


def declared(name: str, results: Any = ("radius", "angle")) -> Any:
    return opsmith.operator(name, results=results)(polar).gradients(
        x=lambda grad_radius, grad_angle, x, y, radius: (grad_radius * x - grad_angle * y / radius) / radius,
        y=lambda grad_radius, grad_angle, x, y, radius: (grad_radius * y + grad_angle * x / radius) / radius,
    )


def test_gradients_of_named_results(name: str) -> None:
    operator = declared(name)
    assert isinstance(operator(*inputs()), tuple)
    assert gradcheck(operator, inputs(), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(operator, inputs(), check_fwd_over_rev=True)


def test_unnamed_results_are_numbered(name: str) -> None:
    operator = opsmith.operator(name)(polar).gradients(
        x=lambda grad_result0, grad_result1, x, y, result0: (
            (grad_result0 * x - grad_result1 * y / result0) / result0
        ),
        y=lambda grad_result0, grad_result1, x, y, result0: (
            (grad_result0 * y + grad_result1 * x / result0) / result0
        ),
    )
    assert gradcheck(operator, inputs())


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_of_an_unused_result_reaches_formulas_as_zeros(name: str, used: int) -> None:
    args = inputs()
    found = grad(declared(name)(*args)[used].sum(), args, create_graph=True)
    expected = grad(polar(*args)[used].sum(), args, create_graph=True)
    assert_close(found, expected)
    assert_close(grad(found[0].sum(), args), grad(expected[0].sum(), args))


def test_single_named_result(name: str) -> None:
    def square(x: Tensor) -> Tensor:
        return x * x

    operator = opsmith.operator(name, results=("area",))(square)
    operator.gradients(x=lambda grad_area, x: 2 * grad_area * x)
    x, _ = inputs()
    assert gradcheck(operator, (x,))


def test_grad_and_result_mean_the_one_that_callers_see(name: str) -> None:
    def growth(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x + 0

    operator = opsmith.operator(name, results=("y", "copy"), hidden=("copy",))(growth)
    x, _ = inputs()
    assert gradcheck(operator.gradients(x=lambda grad, result: grad * result), (x,), check_forward_ad=True)
    assert gradcheck(operator.gradients(x=lambda grad_y, y: grad_y * y), (x,), check_forward_ad=True)


def test_result_that_is_not_differentiable(name: str) -> None:
    operator = declared(name, {"radius": ..., "angle": opsmith.non_differentiable}).gradients(
        x=lambda grad_radius, x, radius: grad_radius * x / radius,
        y=lambda grad_radius, y, radius: grad_radius * y / radius,
    )
    args = inputs()
    radius, angle = operator(*args)
    assert (radius.requires_grad, angle.requires_grad) == (True, False)
    assert_close(grad((radius * angle).sum(), args), grad((polar(*args)[0] * angle).sum(), args))


@pytest.mark.parametrize("way", ["ordinary", "derived", "formula"])
def test_result_of_whole_numbers(name: str, way: str) -> None:
    def ordered(x: Tensor) -> tuple[Tensor, Tensor]:
        found = x.sort()
        return found.values, found.indices

    operator = opsmith.operator(name, results=("values", "order"))(ordered)
    if way == "derived":
        operator.kernel("cpu", ordered)
    if way == "formula":
        operator.gradients(
            x=lambda grad_values, order: torch.zeros_like(grad_values).scatter(0, order, grad_values)
        )
    x, _ = inputs()
    values, order = operator(x)
    assert (values.requires_grad, order.requires_grad, order.dtype) == (True, False, torch.int64)
    assert_close(grad(values[0], x), grad(x.min(), x))
    assert gradcheck(lambda x: operator(x)[0], (x,), check_forward_ad=True)
    assert gradcheck(operator, (x,))


def test_all_results_of_whole_numbers(name: str) -> None:
    def rounded(x: Tensor) -> Tensor:
        return x.round().to(torch.int32)

    for operator in (
        opsmith.operator(name)(rounded),
        opsmith.operator(f"{name}_derived")(rounded).kernel("cpu", rounded),
    ):
        result = operator(inputs()[0])
        assert result.dtype is torch.int32
        assert not result.requires_grad


def test_role_of_a_result_holds_where_gradients_are_derived(name: str) -> None:
    """Without formulas, too, a result that is declared as not differentiable is a constant."""
    roles: Any = {"radius": ..., "angle": opsmith.non_differentiable}
    for operator in (
        opsmith.operator(name, results=roles)(polar),
        opsmith.operator(f"{name}_kernel", results=roles)(polar).kernel("cpu", polar),
    ):
        radius, angle = operator(*inputs())
        assert (radius.requires_grad, angle.requires_grad) == (True, False)


def test_results_of_other_shapes_and_dtypes(name: str) -> None:
    def described(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sum(), x.float().unsqueeze(0), x > 0

    operator = opsmith.operator(name, results=("total", "single", "positive"))(described).gradients(
        x=lambda grad_total, grad_single: grad_total + grad_single[0].double()
    )
    x, _ = inputs()
    total, single, positive = operator(x)
    assert (total.shape, single.shape, positive.shape) == ((), (1, 3), (3,))
    assert (total.dtype, single.dtype, positive.dtype) == (torch.float64, torch.float32, torch.bool)
    assert_close(grad(2 * total + single.sum(), x)[0], torch.full_like(x, 3.0))
