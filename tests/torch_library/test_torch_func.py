"""torch.func: every transform, and nests of them, gives what it gives for the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gated_variants import VARIANTS
from matrices import diagonal
from torch import Tensor, nn
from torch.autograd import forward_ad, grad
from torch.func import (
    functional_call,
    functionalize,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.testing import assert_close

import opsmith
from opsmith import Make

Operator = opsmith.Operator[..., Any]
Function = Callable[..., Tensor]

X, W = Make()(3, 2), Make()(2).neg()
BATCH, WEIGHTS = Make()(4, 3, 2).cos(), Make()(4, 2).sin()


def loss(function: Function) -> Function:
    return lambda *args: function(*args).pow(2).sum()


def of_x(function: Function) -> Function:
    return lambda x: function(x, W)


def of_weight(function: Function) -> Function:
    return lambda weight: function(X, weight)


def dual(function: Function, value: Tensor) -> tuple[Any, ...]:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(function(forward_ad.make_dual(value, value.cos()))))


def requiring(value: Tensor) -> Tensor:
    return value.clone().requires_grad_()


class Gated(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(W.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def ensemble(function: Function) -> Any:
    modules = [Gated(function) for _ in range(3)]
    parameters, buffers = stack_module_state(modules)
    result = vmap(lambda p, b: functional_call(modules[0], (p, b), (X,)))(parameters, buffers)
    return grad(result.pow(2).sum(), parameters["weight"])


def over_closed_weight(function: Function) -> Any:
    weight = requiring(W)
    return grad(vmap(lambda x: function(x, weight))(BATCH).pow(2).sum(), weight)


def over_closed_weight_twice(function: Function) -> Any:
    weight = requiring(W)
    (first,) = grad(vmap(lambda x: function(x, weight))(BATCH).pow(2).sum(), weight, create_graph=True)
    return first.detach(), *grad(first.pow(2).sum(), weight)


def over_batched_leaf(function: Function) -> Any:
    x, weights = requiring(BATCH), requiring(WEIGHTS)
    return grad(vmap(function)(x, weights).pow(2).sum(), (x, weights))


def over_transformed(function: Function) -> Any:
    """Ordinary autograd through what `torch.func.grad` returns."""
    weight = requiring(W)
    return grad(torch.func.grad(lambda x: loss(function)(x, weight))(X).sum(), weight)


def pulled_back(function: Function) -> Any:
    result, pull = vjp(function, X, W)
    gradients = pull(result.cos())
    assert not any(gradient.requires_grad for gradient in gradients)
    return result, gradients, pull(result.sin())


def pulled_back_in_graph(function: Function) -> Any:
    x = requiring(X)
    result, pull = vjp(lambda weight: function(x, weight), W)
    return grad(pull(result.detach().cos())[0].pow(2).sum(), x)


def pulled_back_with_a_graph_of_its_own(function: Function) -> Any:
    cotangent = requiring(X.cos())
    return grad(sum(g.pow(2).sum() for g in vjp(function, X, W)[1](cotangent)), cotangent)


CASES: dict[str, Callable[[Function], Any]] = {
    "grad": lambda f: torch.func.grad(loss(f), (0, 1))(X, W),
    "grad-of-x": lambda f: torch.func.grad(loss(of_x(f)))(X),
    "grad-of-something-else": lambda f: torch.func.grad(lambda z: (f(X, W) * z).sum())(X),
    "grad-and-value": lambda f: torch.func.grad_and_value(loss(f))(X, W),
    "vjp": pulled_back,
    "vjp-in-a-graph": pulled_back_in_graph,
    "vjp-of-a-graph": pulled_back_with_a_graph_of_its_own,
    "jvp": lambda f: jvp(f, (X, W), (X.cos(), W.cos())),
    "jvp-of-x": lambda f: jvp(of_x(f), (X,), (X.cos(),)),
    "jvp-of-something-else": lambda f: jvp(lambda z: f(X, W) * z, (X,), (X.cos(),)),
    "linearize": lambda f: linearize(of_x(f), X)[1](X.cos()),
    "grad-grad": lambda f: torch.func.grad(loss(torch.func.grad(loss(of_weight(f)))))(W),
    "grad-grad-mixed": lambda f: torch.func.grad(
        lambda w: torch.func.grad(lambda x: loss(f)(x, w))(X).pow(2).sum()
    )(W),
    "grad-grad-grad": lambda f: torch.func.grad(
        loss(torch.func.grad(loss(torch.func.grad(loss(of_weight(f))))))
    )(W),
    "jacrev": lambda f: jacrev(f, (0, 1))(X, W),
    "jacrev-in-chunks": lambda f: jacrev(of_x(f), chunk_size=2)(X),
    "jacfwd": lambda f: jacfwd(f, (0, 1))(X, W),
    "hessian": lambda f: hessian(loss(f), (0, 1))(X, W),
    "jacrev-jacfwd": lambda f: jacrev(jacfwd(loss(of_weight(f))))(W),
    "jacfwd-jacfwd": lambda f: jacfwd(jacfwd(loss(of_weight(f))))(W),
    "jacrev-jacrev": lambda f: jacrev(jacrev(loss(of_weight(f))))(W),
    "jvp-grad": lambda f: jvp(torch.func.grad(loss(of_weight(f))), (W,), (W.cos(),)),
    "grad-jvp": lambda f: torch.func.grad(lambda w: jvp(lambda x: f(x, w), (X,), (X.cos(),))[1].pow(2).sum())(
        W
    ),
    "jvp-jvp": lambda f: jvp(lambda w: jvp(lambda w: f(X, w), (w,), (W.cos(),))[1], (W,), (W.sin(),)),
    "vmap": lambda f: vmap(f)(BATCH, WEIGHTS),
    "vmap-of-x": lambda f: vmap(f, (0, None))(BATCH, W),
    "vmap-of-weight": lambda f: vmap(f, (None, 0))(X, WEIGHTS),
    "vmap-dims": lambda f: vmap(f, (1, 0), 2)(BATCH.movedim(0, 1), WEIGHTS),
    "vmap-negative-dims": lambda f: vmap(f, (-1, -1), -1)(BATCH.movedim(0, -1), WEIGHTS.mT),
    "vmap-in-chunks": lambda f: vmap(f, chunk_size=3)(BATCH, WEIGHTS),
    "vmap-vmap": lambda f: vmap(vmap(f, (0, None)), (None, 0))(BATCH, WEIGHTS),
    "vmap-of-something-else": lambda f: vmap(lambda z: f(X, W) * z)(BATCH),
    "vmap-grad": lambda f: vmap(torch.func.grad(loss(f), (0, 1)))(BATCH, WEIGHTS),
    "vmap-grad-one-weight": lambda f: vmap(torch.func.grad(loss(f), (0, 1)), (0, None))(BATCH, W),
    "vmap-vjp": lambda f: vmap(lambda x: vjp(of_x(f), x)[1](x.cos())[0])(BATCH),
    "vmap-jvp": lambda f: vmap(lambda x: jvp(of_x(f), (x,), (x.cos(),)))(BATCH),
    "vmap-hessian": lambda f: vmap(hessian(loss(of_weight(f))))(WEIGHTS),
    "vmap-jacfwd": lambda f: vmap(jacfwd(of_x(f)))(BATCH),
    "grad-vmap": lambda f: torch.func.grad(lambda w: vmap(lambda x: f(x, w))(BATCH).pow(2).sum())(W),
    "grad-grad-vmap": lambda f: torch.func.grad(
        loss(torch.func.grad(lambda w: vmap(lambda x: f(x, w))(BATCH).pow(2).sum()))
    )(W),
    "jvp-vmap": lambda f: jvp(vmap(f), (BATCH, WEIGHTS), (BATCH.cos(), WEIGHTS.cos())),
    "jvp-vmap-one-weight": lambda f: jvp(lambda w: vmap(lambda x: f(x, w))(BATCH), (W,), (W.cos(),)),
    "vmap-grad-vmap": lambda f: vmap(torch.func.grad(lambda w: vmap(lambda x: f(x, w))(BATCH).pow(2).sum()))(
        WEIGHTS
    ),
    "jvp-grad-vmap": lambda f: jvp(
        torch.func.grad(lambda w: vmap(lambda x: f(x, w))(BATCH).pow(2).sum()), (W,), (W.cos(),)
    ),
    "autograd-over-vmap": over_closed_weight,
    "autograd-twice-over-vmap": over_closed_weight_twice,
    "autograd-over-vmap-of-leaves": over_batched_leaf,
    "autograd-over-grad": over_transformed,
    "dual-over-vmap": lambda f: dual(vmap(of_x(f)), BATCH),
    "dual-over-grad": lambda f: dual(torch.func.grad(loss(of_weight(f))), W),
    "dual-closed-over-vmap": lambda f: dual(lambda w: vmap(lambda x: f(x, w))(BATCH), W),
    "batched-vectors": lambda f: grad(
        f(x := requiring(X), w := requiring(W)), (x, w), BATCH, is_grads_batched=True
    ),
    "functionalize": lambda f: functionalize(f)(X, W),
    "functionalize-grad": lambda f: functionalize(torch.func.grad(loss(f)))(X, W),
    "grad-functionalize": lambda f: torch.func.grad(loss(functionalize(f)))(X, W),
    "functional-call": lambda f: functional_call(Gated(f), {"weight": W.sin()}, (X,)),
    "grad-of-functional-call": lambda f: torch.func.grad(
        lambda p: functional_call(Gated(f), p, (X,)).pow(2).sum()
    )({"weight": W})["weight"],
    "ensemble": ensemble,
}


# torch.func.linearize warns of its own way to hold constants, for the reference as well.
@pytest.mark.every(8)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize(("variant", "case"), diagonal(VARIANTS, CASES, every=4), indirect=["variant"])
def test_transform(case: str, variant: Operator, reference: Function) -> None:
    assert_close(CASES[case](variant), CASES[case](reference))


@pytest.mark.parametrize("case", ["grad", "vmap", "vmap-grad", "jvp-vmap"])
def test_nothing_is_left_behind_by_a_formula_that_raises(case: str, name: str, reference: Any) -> None:
    """After an exception inside a transform, the next call is right: no layer or flag is left on."""
    switch = {"broken": True}

    def formula(grad: Tensor, x: Tensor, weight: Tensor, by: float) -> Tensor:
        if switch["broken"]:
            raise ArithmeticError("broken")
        return 3 * by * grad * x**2 * weight.tanh()

    operator = opsmith.operator(name)(reference).gradients(x=formula)
    if case != "vmap":
        with pytest.raises(ArithmeticError, match="broken"):
            CASES[case](operator)
    switch["broken"] = False
    assert_close(CASES[case](operator), CASES[case](reference))
    assert torch.is_grad_enabled()


def test_surrogate_gradient_stays_in_force_under_transforms(name: str) -> None:
    """A gradient that is wrong on purpose is told apart from the reference's, which would be silent."""

    def rounded(x: Tensor) -> Tensor:
        return x.round()

    operator = opsmith.operator(name)(rounded).surrogate_gradients(x=lambda grad: 3 * grad)
    three = torch.full_like(X, 3.0)
    assert_close(torch.func.grad(lambda x: operator(x).sum())(X), three)
    assert_close(vmap(torch.func.grad(lambda x: operator(x).sum()))(BATCH), torch.full_like(BATCH, 3.0))
    assert_close(torch.func.grad(lambda x: vmap(operator)(x).sum())(BATCH), torch.full_like(BATCH, 3.0))
    assert_close(jvp(operator, (X,), (X.cos(),))[1], 3 * X.cos())
    assert_close(vjp(operator, X)[1](three)[0], 3 * three)
    assert_close(jacfwd(operator)(X[0]), 3 * torch.eye(2, dtype=X.dtype))
    assert_close(jacrev(operator)(X[0]), 3 * torch.eye(2, dtype=X.dtype))
    assert_close(jvp(vmap(operator), (BATCH,), (BATCH.cos(),))[1], 3 * BATCH.cos())


def test_surrogate_stand_in_stays_in_force_under_transforms(name: str) -> None:
    def stepped(x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    operator = opsmith.operator(name)(stepped).surrogate_gradients(_sigmoid)
    slope = torch.func.grad(lambda x: torch.sigmoid(x).sum())
    assert_close(torch.func.grad(lambda x: operator(x).sum())(X), slope(X))
    assert_close(vmap(torch.func.grad(lambda x: operator(x).sum()))(BATCH), slope(BATCH))
    assert_close(jvp(operator, (X,), (X.cos(),))[1], slope(X) * X.cos())
    assert_close(hessian(lambda x: operator(x).sum())(X[0]), hessian(lambda x: torch.sigmoid(x).sum())(X[0]))


def _sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def test_answers_under_transforms(name: str) -> None:
    def product(x: Tensor, mask: Tensor, zero: Tensor) -> Tensor:
        return x * mask * (1 + zero)

    operator = opsmith.operator(name)(product).gradients(
        x=lambda grad, mask, zero: grad * mask * (1 + zero),
        mask=opsmith.non_differentiable,
        zero=opsmith.zero,
    )
    args = X, X.sign(), X.abs()
    gradients = torch.func.grad(lambda *args: operator(*args).sum(), (0, 1, 2))(*args)
    assert_close(gradients, (X.sign() * (1 + X.abs()), torch.zeros_like(X), torch.zeros_like(X)))
    assert_close(jvp(operator, args, (X, X, X))[1], X * X.sign() * (1 + X.abs()))
    moved = jvp(lambda mask: operator(X, mask, X), (X.sign(),), (X,))[1]
    assert_close(moved, torch.zeros_like(X))
    assert_close(
        vmap(torch.func.grad(lambda x: operator(x, x.sign(), x).sum()))(BATCH), BATCH.sign() * (1 + BATCH)
    )


def test_lists_under_transforms(name: str) -> None:
    def weighted(xs: list[Tensor], weights: list[float]) -> Tensor:
        return torch.stack([x**2 * weight for x, weight in zip(xs, weights, strict=True)]).sum(0)

    def formula(grad: Tensor, xs: list[Tensor], weights: list[float]) -> list[Tensor]:
        return [2 * grad * x * weight for x, weight in zip(xs, weights, strict=True)]

    for operator in (
        opsmith.operator(name)(weighted).gradients(xs=formula),
        opsmith.operator(f"{name}_derived")(weighted).kernel("cpu", weighted),
    ):
        for f in (
            lambda op: torch.func.grad(lambda x: op([x, W, x * 2], [1.0, 2.0, 3.0]).sum())(W),
            lambda op: vmap(lambda x: op([x, W], [1.0, 2.0]))(WEIGHTS),
            lambda op: vmap(torch.func.grad(lambda x: op([W, x], [1.0, 2.0]).pow(2).sum()))(WEIGHTS),
            lambda op: jvp(lambda x: op([x, W, x], [1.0, 2.0, 3.0]), (W,), (W.cos(),)),
            lambda op: hessian(lambda x: op([x, W], [1.0, 2.0]).pow(2).sum())(W),
        ):
            assert_close(f(operator), f(weighted))


def test_several_results_under_transforms(name: str) -> None:
    """One result depends on the batch and the other does not; one of them is of whole numbers."""

    def three(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * weight, weight**2, x.argmax(-1)

    operators = [
        opsmith.operator(name, results=("product", "square", "where"))(three).gradients(
            x=lambda grad_product, weight: grad_product * weight,
            weight=lambda grad_product, grad_square, x, weight: (
                (grad_product * x).sum(0) + 2 * grad_square * weight
            ),
        ),
        opsmith.operator(f"{name}_derived")(three).kernel("cpu", three),
    ]

    def total(results: tuple[Tensor, ...]) -> Tensor:
        return results[0].pow(2).sum() + results[1].pow(3).sum()

    for operator in operators:
        for f in (
            lambda op: vmap(op, (0, None))(BATCH, W),
            lambda op: torch.func.grad(lambda x, w: total(op(x, w)), (0, 1))(X, W),
            lambda op: torch.func.grad(lambda w: total(vmap(op, (0, None))(BATCH, w)))(W),
            lambda op: vmap(torch.func.grad(lambda x, w: total(op(x, w)), (0, 1)), (0, None))(BATCH, W),
            lambda op: hessian(lambda w: total(op(X, w)))(W),
            lambda op: jvp(lambda w: vmap(op, (0, None))(BATCH, w)[:2], (W,), (W.cos(),)),
            lambda op: jvp(lambda x: op(x, W)[1], (X,), (X.cos(),))[0],
        ):
            assert_close(f(operator), f(three))


def test_operator_without_tensors_under_vmap(name: str) -> None:
    def filled(size: int, value: float) -> Tensor:
        return torch.full((size,), value, dtype=torch.float64)

    operator = opsmith.operator(name)(filled)
    assert_close(vmap(lambda w: operator(2, 3.0) * w)(WEIGHTS), 3 * WEIGHTS)


def test_opaque_operator_under_transforms(name: str) -> None:
    def routine(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() ** 3)

    operator = opsmith.operator(name, opaque=True)(routine).gradients(x=lambda grad, x: 3 * grad * x**2)
    cube = lambda x: x**3
    for f in (
        lambda op: vmap(op)(BATCH),
        lambda op: vmap(op, 1, 2)(BATCH),
        lambda op: torch.func.grad(lambda x: op(x).pow(2).sum())(X),
        lambda op: vmap(torch.func.grad(lambda x: op(x).pow(2).sum()))(BATCH),
        lambda op: torch.func.grad(lambda x: vmap(op)(x).pow(2).sum())(BATCH),
        lambda op: jvp(op, (X,), (X.cos(),)),
        lambda op: jvp(vmap(op), (BATCH,), (BATCH.cos(),)),
        lambda op: hessian(lambda x: op(x).sum())(W),
        lambda op: vmap(hessian(lambda x: op(x).sum()))(WEIGHTS),
        lambda op: vmap(vmap(op))(BATCH),
    ):
        assert_close(f(operator), f(cube))


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_random_operator_under_vmap(name: str, randomness: str) -> None:
    def dropped(x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 0.5)

    operator = opsmith.operator(name, random=True)(dropped)
    ones = torch.ones(4, 64)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(operator, randomness=randomness)(ones)
        return
    rows = vmap(operator, randomness=randomness)(ones)
    assert 0 < rows.mean() < 1
    alike = [bool((row == rows[0]).all()) for row in rows[1:]]
    assert alike == [randomness == "same"] * 3
