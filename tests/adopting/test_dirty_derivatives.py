"""Derivatives and transforms of classes that write in place, and of their functional forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dirty_classes import (
    CASES,
    Case,
    Doubles,
    Sigmoid,
    Squares,
    WithSign,
    WritesSecond,
    numbers,
    results_of,
    true_derivative,
)
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.testing import assert_close

import opsmith
from opsmith import errors


def test_a_backward_finds_a_saved_tensor_modified() -> None:
    operator = opsmith.adopt(Doubles, "dirty::modified")
    for call in (Doubles.apply, operator, operator):
        x = numbers(3).requires_grad_() * 1
        kept = x * x
        call(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()


def test_the_history_goes_on_from_the_write() -> None:
    operator = opsmith.adopt(Squares, "dirty::history")
    for call in (Squares.apply, operator, operator):
        leaf = numbers(3).requires_grad_()
        base = leaf * 3
        view = base[:2]
        assert call(view) is view
        (gradient,) = torch.autograd.grad(base.sum(), leaf)
        assert_close(gradient, torch.cat([18 * leaf[:2], torch.full((1,), 3.0)]).double().detach())


@pytest.mark.every(8)
@true_derivative
def test_derivatives_of_the_functional_form_and_of_the_call(case: Case) -> None:
    operator = case.operator
    tensors = [
        at for at, value in enumerate(case.make()) if isinstance(value, Tensor) and value.is_floating_point()
    ]

    def of(function: Any) -> Any:
        def call(*given: Tensor) -> Any:
            arguments = list(case.make())
            for at, value in zip(tensors, given, strict=True):
                arguments[at] = value * 1
            found = results_of(function(*arguments))
            return tuple(each for each in found if each.requires_grad)

        return call

    leaves = [case.make()[at].requires_grad_() for at in tensors]
    for function in (operator, operator.functional):
        assert torch.autograd.gradcheck(of(function), leaves)
        assert torch.autograd.gradgradcheck(of(function), leaves)


@true_derivative
def test_the_functional_form_writes_nothing(case: Case) -> None:
    operator, given = case.operator, case.make()
    operator(*case.make())
    found = operator.functional(*given)
    assert not any("in place" in note for note in operator.functional.explain(*given).notes)
    assert_close(list(results_of(found)), list(results_of(case.truth(*case.make()))))
    assert_close([*given], [*case.make()])


@true_derivative
def test_transforms(case: Case) -> None:
    operator = case.operator
    tensors = [at for at, value in enumerate(case.make()) if isinstance(value, Tensor)]
    rest = case.make()

    def through(function: Any) -> Any:
        def call(*given: Tensor) -> Any:
            arguments = list(rest)
            for at, value in zip(tensors, given, strict=True):
                arguments[at] = value * 1
            results = results_of(function(*arguments))
            return (*results, *(arguments[at] for at in case.written))

        return call

    def truth(*given: Tensor) -> Any:
        arguments = list(rest)
        for at, value in zip(tensors, given, strict=True):
            arguments[at] = value
        results = results_of(case.truth(*arguments))
        written = {"writes_two": lambda: (results[1], results[0])}.get(
            next(name for name, each in CASES.items() if each is case), lambda: results[-1:]
        )
        return (*results, *(written() if case.written else ()))

    given = tuple(rest[at] for at in tensors)
    tangents = tuple(numbers(*each.shape, seed=5) for each in given)
    assert_close(torch.func.jvp(through(operator), given, tangents), torch.func.jvp(truth, given, tangents))
    batch = tuple(torch.stack([each, 2 * each, -each]) for each in given)
    assert_close(torch.vmap(through(operator))(*batch), torch.vmap(truth)(*batch))
    argnums = tuple(range(len(given)))

    def loss(function: Any) -> Any:
        return lambda *given: sum((each**2).sum() for each in function(*given))

    gradients = torch.func.grad(loss(through(operator)), argnums)
    expected = torch.func.grad(loss(truth), argnums)
    assert_close(gradients(*given), expected(*given))
    assert_close(torch.vmap(gradients)(*batch), torch.vmap(expected)(*batch))


def test_what_vmap_maps_is_written_into_what_it_maps() -> None:
    operator, scale = opsmith.adopt(WritesSecond, "dirty::mapped"), numbers(3, 4, seed=1)
    rows = numbers(3, 4)
    given = rows.clone()
    torch.vmap(operator)(scale, given)
    assert_close(given, scale * rows)
    with pytest.raises(errors.TransformError, match="cannot write a mapped value into `x`"):
        torch.vmap(operator, in_dims=(0, None))(scale, rows[0].clone())


def test_forward_mode_by_its_own_jvp_writes_into_the_tangent() -> None:
    operator = opsmith.adopt(Sigmoid, "dirty::dual")
    primal, tangent = numbers(3), numbers(3, seed=1)
    for call in (Sigmoid.apply, operator, operator):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(primal.clone(), tangent.clone())
            y = call(x)
            value, moved = forward_ad.unpack_dual(x)
            assert_close(value, primal.sigmoid())
            assert_close(moved, tangent * primal.sigmoid() * (1 - primal.sigmoid()))
            assert_close(forward_ad.unpack_dual(y).tangent, moved)


def test_forward_mode_beside_a_result_that_is_a_constant() -> None:
    operator = opsmith.adopt(WithSign, "dirty::dual_constant")
    primal, tangent = numbers(3), numbers(3, seed=1)
    for _ in range(2):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(primal.clone(), tangent.clone())
            sign, y = operator(x)
            assert y is x
            assert forward_ad.unpack_dual(sign).tangent is None
            assert_close(forward_ad.unpack_dual(x).tangent, tangent * primal.sign())


def test_a_second_order_costs_a_copy_only_where_the_class_keeps_what_it_computed() -> None:
    keeps, saves = opsmith.adopt(Squares, "dirty::keeps"), opsmith.adopt(Sigmoid, "dirty::saves")
    for operator in (keeps, saves):
        operator(numbers(3).requires_grad_() * 1)
    copied = "`x` is copied if a gradient is needed: a second-order gradient needs the old value"
    assert copied in keeps.explain(numbers(3)).notes
    assert copied not in saves.explain(numbers(3)).notes


class KeepsLater(Function):
    times = 0

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        cls.times += 1
        ctx.slope = 2 * x if cls.times > 1 else None
        ctx.mark_dirty(x)
        return x.square_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.slope is None else grad * ctx.slope


def test_a_second_order_through_a_value_that_is_gone_is_refused() -> None:
    operator = opsmith.adopt(KeepsLater, "dirty::keeps_later")
    operator(numbers(3).requires_grad_() * 1)
    x = numbers(3).requires_grad_()
    (gradient,) = torch.autograd.grad(operator(x * 1).sum(), x, create_graph=True)
    assert_close(gradient.detach(), 2 * x.detach())
    with pytest.raises(
        errors.TransformError, match="but a second-order gradient needs the old content"
    ) as raised:
        gradient.sum().backward()
    assert "call it again: later calls keep a copy" in str(raised.value)


class OnceInPlace(Sigmoid):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


def test_a_backward_that_is_once_differentiable() -> None:
    operator, x = opsmith.adopt(OnceInPlace, "dirty::once"), numbers(3).requires_grad_()
    (gradient,) = torch.autograd.grad(operator(x * 1).sum(), x, create_graph=True)
    assert_close(gradient.detach(), (x.sigmoid() * (1 - x.sigmoid())).detach())
    with pytest.raises(errors.TransformError, match="once_differentiable"):
        gradient.sum().backward()


class WithoutBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.sin_()


def test_a_class_without_a_backward_gets_one() -> None:
    operator = opsmith.adopt(WithoutBackward, "dirty::without_backward")
    leaf = numbers(3).requires_grad_()
    for _ in range(2):
        x = leaf * 1
        assert operator(x) is x
        assert_close(torch.autograd.grad(x.sum(), leaf)[0], leaf.detach().cos())
    assert torch.autograd.gradgradcheck(lambda x: operator(x * 1), leaf)


def test_with_a_reference_second_orders_follow_from_it() -> None:
    operator = opsmith.adopt(OnceInPlace, "dirty::with_reference", reference=torch.sigmoid)
    leaf = numbers(3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: operator(x * 1), leaf)
    given = numbers(3)
    assert operator.reference(given) is given
    assert_close(given, numbers(3).sigmoid())


def test_formulas_and_kernels_that_are_given_later() -> None:
    operator = opsmith.adopt(Doubles, "dirty::later")
    operator(numbers(3))
    operator.gradients(x=lambda grad: 10 * grad)
    leaf = numbers(3).requires_grad_()
    x = leaf * 1
    operator(x)
    assert_close(torch.autograd.grad(x.sum(), leaf)[0], torch.full((3,), 10.0).double())

    @operator.kernel("cpu")
    def other(x: Tensor) -> None:
        x.mul_(4)

    given = numbers(3)
    assert operator(given) is given
    assert_close(given, 4 * numbers(3))
