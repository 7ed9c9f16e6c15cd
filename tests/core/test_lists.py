"""Lists of tensors: of any length, some without a gradient, some items None."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.testing import assert_close

import opsmith

Operator = opsmith.Operator[..., Any]


def total(xs: list[Tensor], scale: Tensor) -> Tensor:
    """Σᵢ (i + 1) xᵢ² scale, and zero for none."""
    return sum(((i + 1) * x**2 * scale for i, x in enumerate(xs)), torch.zeros_like(scale))


def gradient_of_xs(grad: Tensor, xs: list[Tensor], scale: Tensor) -> list[Tensor]:
    return [2 * (i + 1) * grad * x * scale for i, x in enumerate(xs)]


def gradient_of_scale(grad: Tensor, xs: list[Tensor]) -> Tensor:
    return grad * sum(((i + 1) * x**2 for i, x in enumerate(xs)), torch.zeros_like(grad))


WAYS = ["ordinary", "derived", "formulas", "xs", "scale", "joint"]


def declared(name: str, way: str) -> Operator:
    operator = opsmith.operator(name)(total)
    if way == "derived":
        operator.kernel("cpu", total)
    if way in ("formulas", "xs"):
        operator.gradients(xs=gradient_of_xs)
    if way in ("formulas", "scale"):
        operator.gradients(scale=gradient_of_scale)
    if way == "joint":
        operator.gradients(
            lambda grad, xs, scale: {
                "xs": gradient_of_xs(grad, xs, scale),
                "scale": gradient_of_scale(grad, xs),
            }
        )
    return operator


@pytest.mark.every(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "needs",
    [(True,), (True, True, True), (False, True, False), (False, False)],
    ids=["one", "three", "middle-of-three", "none-of-two"],
)
def test_gradients(way: str, needs: tuple[bool, ...], name: str) -> None:
    operator, make = declared(name, way), opsmith.Make()
    xs = [make(2).requires_grad_(need) for need in needs]
    scale = make(2).requires_grad_()

    def spread(scale: Tensor, *xs: Tensor) -> Tensor:
        return operator(list(xs), scale)

    assert_close(spread(scale, *xs), total(xs, scale))
    assert gradcheck(spread, (scale, *xs), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(spread, (scale, *xs), check_fwd_over_rev=any(needs))


@pytest.mark.parametrize("way", WAYS)
def test_empty_list(way: str, name: str) -> None:
    scale = torch.ones(2, requires_grad=True)
    result = declared(name, way)([], scale)
    assert_close(result, torch.zeros(2))
    if result.requires_grad:
        assert_close(grad(result.sum(), scale)[0], torch.zeros(2))


@pytest.mark.parametrize("container", [list, tuple], ids=["list", "tuple"])
def test_reference_and_formulas_get_a_list(container: Any, name: str) -> None:
    seen: list[type] = []

    def reference(xs: list[Tensor]) -> Tensor:
        seen.append(type(xs))
        return torch.stack(xs).sum(0)

    def formula(grad: Tensor, xs: list[Tensor]) -> list[Tensor]:
        seen.append(type(xs))
        return [grad.clone() for _ in xs]

    operator = opsmith.operator(name)(reference).gradients(xs=formula)
    operator(container([torch.ones(2, requires_grad=True), torch.ones(2)])).sum().backward()
    assert seen == [list, list]


def test_tuple_of_any_length_comes_as_a_tuple(name: str) -> None:
    def reference(xs: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(xs, tuple)
        return torch.stack(xs).sum(0)

    operator = opsmith.operator(name)(reference)
    x = torch.ones(2, requires_grad=True)
    assert_close(grad(operator([x, x, 2 * x]).sum(), x)[0], torch.full((2,), 4.0))


def test_same_tensor_twice_in_a_list(name: str) -> None:
    operator = declared(name, "formulas")
    x, scale = opsmith.Make()(2).requires_grad_(), torch.ones(2, dtype=torch.float64)
    assert_close(grad(operator([x, x], scale).sum(), x), grad(total([x, x], scale).sum(), x))


def test_broadcast_items_are_reduced(name: str) -> None:
    def reference(xs: list[Tensor]) -> Tensor:
        return xs[0] * xs[1]

    operator = opsmith.operator(name)(reference).gradients(xs=lambda grad, xs: [grad * xs[1], grad * xs[0]])
    make = opsmith.Make()
    assert gradcheck(lambda a, b: operator([a, b]), (make(3, 2).requires_grad_(), make(2).requires_grad_()))


@pytest.mark.parametrize("way", ["ordinary", "derived", "formula"])
def test_list_of_optional_tensors(way: str, name: str) -> None:
    def indexed(xs: list[Tensor | None]) -> Tensor:
        return torch.stack([x**2 for x in xs if x is not None]).sum(0)

    operator = opsmith.operator(name)(indexed)
    if way == "derived":
        operator.kernel("cpu", indexed)
    if way == "formula":
        operator.gradients(xs=lambda grad, xs: [None if x is None else 2 * grad * x for x in xs])
    make = opsmith.Make()
    a, b = make(2).requires_grad_(), make(2).requires_grad_()
    assert gradcheck(lambda a, b: operator([None, a, None, b]), (a, b), check_forward_ad=True)
    assert gradgradcheck(lambda a, b: operator([None, a, b.detach()]), (a, b))


@pytest.mark.parametrize("given", [True, False])
def test_optional_list(given: bool, name: str) -> None:
    def reference(x: Tensor, others: list[Tensor] | None = None) -> Tensor:
        return x * 1 if others is None else torch.stack(others).sum(0) * x

    def formula(grad: Tensor, x: Tensor, others: list[Tensor] | None) -> Any:
        assert others is not None
        return [grad * x for _ in others]

    operator = opsmith.operator(name)(reference).gradients(others=formula)
    x = torch.full((2,), 3.0, requires_grad=True)
    others = [torch.ones(2, requires_grad=True), torch.ones(2)] if given else None
    result = operator(x, others)
    assert_close(grad(result.sum(), x, retain_graph=True)[0], torch.full((2,), 2.0 if given else 1.0))
    if others is not None:
        assert_close(grad(result.sum(), others[0])[0], torch.full((2,), 3.0))


def test_two_lists(name: str) -> None:
    def dots(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
        return torch.stack([x @ y for x, y in zip(xs, ys, strict=True)])

    operator = opsmith.operator(name)(dots).gradients(
        xs=lambda grad, ys: [g * y for g, y in zip(grad, ys, strict=True)],
        ys=lambda grad, xs: [g * x for g, x in zip(grad, xs, strict=True)],
    )
    make = opsmith.Make()
    tensors = tuple(make(size).requires_grad_() for size in (2, 3, 2, 3))
    assert gradcheck(lambda a, b, c, d: operator([a, b], [c, d]), tensors, check_forward_ad=True)
    assert gradgradcheck(lambda a, b, c, d: operator([a, b], [c, d]), tensors)
