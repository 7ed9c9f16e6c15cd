"""Every way to give gradients comes to the same first, second and third derivatives, in both modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck
from torch.testing import assert_close

import opsmith

Inputs = tuple[Tensor, Tensor]
Reference = Callable[..., Tensor]
Operator = opsmith.Operator[..., Any]

NEEDS = [(True, True), (True, False), (False, True)]
NEED_IDS = ["both", "x", "weight"]


def some(inputs: Inputs, needs: tuple[bool, bool]) -> tuple[Tensor, ...]:
    return tuple(value.detach().requires_grad_(need) for value, need in zip(inputs, needs, strict=True))


@pytest.mark.every(5)
@pytest.mark.parametrize("needs", NEEDS, ids=NEED_IDS)
def test_gradcheck(variant: Operator, inputs: Inputs, needs: tuple[bool, bool]) -> None:
    assert gradcheck(variant, some(inputs, needs), check_forward_ad=True)


def test_gradcheck_fast(variant: Operator, inputs: Inputs) -> None:
    assert gradcheck(variant, inputs, check_forward_ad=True, fast_mode=True)


@pytest.mark.every(5)
def test_gradcheck_batched_forward(variant: Operator, inputs: Inputs) -> None:
    assert gradcheck(
        variant, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )


@pytest.mark.every(5)
@pytest.mark.parametrize("needs", NEEDS, ids=NEED_IDS)
def test_gradgradcheck(variant: Operator, inputs: Inputs, needs: tuple[bool, bool]) -> None:
    assert gradgradcheck(variant, some(inputs, needs))


@pytest.mark.every(8)
def test_gradgradcheck_forward_over_reverse(variant: Operator, inputs: Inputs) -> None:
    assert gradgradcheck(variant, inputs, check_fwd_over_rev=True, check_batched_grad=True)


def test_third_order(variant: Operator, reference: Reference, inputs: Inputs) -> None:
    def third(function: Any) -> tuple[Tensor, ...]:
        (first,) = grad(function(*inputs).pow(2).sum(), inputs[1], create_graph=True)
        second = grad(first.pow(2).sum(), inputs, create_graph=True)
        return grad(sum(value.pow(2).sum() for value in second), inputs)

    assert_close(third(variant), third(reference))


def test_result_and_graph_are_those_of_one_operator(variant: Operator, inputs: Inputs) -> None:
    result = variant(*inputs)
    assert result.requires_grad
    assert result.is_leaf is False
    assert_close(result, variant(*(value.detach() for value in inputs)))


def test_no_gradients_without_grad_mode(variant: Operator, inputs: Inputs) -> None:
    with torch.no_grad():
        assert not variant(*inputs).requires_grad
    with torch.inference_mode():
        assert variant(*inputs).is_inference()
        assert variant(*(value.clone() for value in inputs)).is_inference()


def test_backward_twice_over_a_kept_graph(variant: Operator, inputs: Inputs) -> None:
    loss = variant(*inputs).sum()
    first = grad(loss, inputs, retain_graph=True)
    assert_close(grad(loss, inputs), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        grad(loss, inputs)


def test_graph_is_left_out_where_nobody_asked_for_it(variant: Operator, inputs: Inputs) -> None:
    gradients = grad(variant(*inputs).sum(), inputs)
    assert [gradient.requires_grad for gradient in gradients] == [False, False]


def tangents_of_gradients(function: Any, inputs: Inputs, create_graph: bool) -> list[Tensor]:
    """Forward over reverse: gradients and their tangents, where arguments and cotangent all move."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(value, value.detach().sin()) for value in inputs]
        result = function(*duals)
        cotangent = forward_ad.make_dual(result.detach().cos(), result.detach().sin())
        gradients = grad(result, duals, cotangent, create_graph=create_graph)
        return [part.detach() for gradient in gradients for part in forward_ad.unpack_dual(gradient)]


@pytest.mark.parametrize("create_graph", [False, True])
def test_forward_over_reverse(
    variant: Operator, reference: Reference, inputs: Inputs, create_graph: bool
) -> None:
    expected = tangents_of_gradients(reference, inputs, create_graph)
    assert_close(tangents_of_gradients(variant, inputs, create_graph), expected)


@pytest.mark.parametrize("moving", ["x", "weight"])
def test_forward_over_reverse_in_one_input(
    variant: Operator, reference: Reference, inputs: Inputs, moving: str
) -> None:
    """The tangent is in one input, the gradient is of the other."""

    def mixed(function: Any) -> Tensor:
        x, weight = (value.detach() for value in inputs)
        with forward_ad.dual_level():
            if moving == "x":
                dual, leaf = forward_ad.make_dual(x, x.cos()), weight.requires_grad_()
                (gradient,) = grad(function(dual, leaf).pow(2).sum(), leaf)
            else:
                leaf, dual = x.requires_grad_(), forward_ad.make_dual(weight, weight.cos())
                (gradient,) = grad(function(leaf, dual).pow(2).sum(), leaf)
            tangent = forward_ad.unpack_dual(gradient).tangent
            assert tangent is not None
            return tangent

    assert_close(mixed(variant), mixed(reference))


def test_reverse_over_forward(variant: Operator, reference: Reference, inputs: Inputs) -> None:
    def directional(function: Any) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(inputs[0], inputs[0].detach().sin())
            tangent = forward_ad.unpack_dual(function(dual, inputs[1])).tangent
            return tangent.detach(), *grad(tangent.pow(2).sum(), inputs)

    assert_close(directional(variant), directional(reference))


def test_tangents_through_a_chain(variant: Operator, reference: Reference, inputs: Inputs) -> None:
    def chained(function: Any) -> Tensor:
        x, weight = (value.detach() for value in inputs)
        with forward_ad.dual_level():
            inner = function(forward_ad.make_dual(x, x.sin()), weight, 0.5)
            primal, tangent = forward_ad.unpack_dual(function(inner.exp(), weight, by=2.0))
            assert not tangent.requires_grad
            return torch.stack([primal, tangent])

    assert_close(chained(variant), chained(reference))


def test_no_tangent_where_nothing_moves(variant: Operator, inputs: Inputs) -> None:
    x, weight = (value.detach() for value in inputs)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(variant(x, weight)).tangent is None


@pytest.mark.every(5)
@pytest.mark.parametrize("vectorize", [False, True])
def test_functional_jacobian_and_hessian(
    variant: Operator, reference: Reference, inputs: Inputs, vectorize: bool
) -> None:
    from torch.autograd.functional import hessian, hvp, jacobian, jvp, vhp

    x, weight = (value.detach() for value in inputs)

    def both(function: Any) -> list[Any]:
        def loss(weight: Tensor) -> Tensor:
            return function(x, weight).pow(2).sum()

        return [
            jacobian(function, (x, weight), vectorize=vectorize),
            hessian(loss, weight, vectorize=vectorize),
            hvp(loss, weight, weight.cos()),
            vhp(loss, weight, weight.cos()),
            jvp(lambda weight: function(x, weight), weight, weight.cos()),
        ]

    assert_close(both(variant), both(reference))


def test_functional_jacobian_in_forward_mode(variant: Operator, reference: Reference, inputs: Inputs) -> None:
    from torch.autograd.functional import jacobian

    def forward(function: Any) -> Any:
        return jacobian(function, inputs, vectorize=True, strategy="forward-mode")

    assert_close(forward(variant), forward(reference))


def test_checkpoint(variant: Operator, reference: Reference, inputs: Inputs) -> None:
    from torch.utils.checkpoint import checkpoint

    expected = grad(reference(*inputs).sin().sum(), inputs)
    for reentrant in (False, True):
        result = checkpoint(lambda *values: variant(*values).sin(), *inputs, use_reentrant=reentrant)
        assert_close(
            torch.autograd.grad(result.sum(), inputs) if not reentrant else leaves(result, inputs), expected
        )


def leaves(result: Tensor, inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Gradients as `.grad`, which is all that reentrant checkpoints can do."""
    for value in inputs:
        value.grad = None
    result.sum().backward()
    return tuple(value.grad for value in inputs)


def test_saved_tensors_hooks(variant: Operator, reference: Reference, inputs: Inputs) -> None:
    packed: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        packed.append(value)
        return value.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = variant(*inputs)
    assert packed
    assert_close(grad(result.sum(), inputs), grad(reference(*inputs).sum(), inputs))


def test_saved_on_cpu(variant: Operator, reference: Reference, inputs: Inputs) -> None:
    with torch.autograd.graph.save_on_cpu():
        result = variant(*inputs)
    assert_close(grad(result.sum(), inputs), grad(reference(*inputs).sum(), inputs))
