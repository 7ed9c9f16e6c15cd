"""Tangent formulas: in force in forward mode, whatever transforms surround it, and only there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.func as F
from faults_of_torch import marked
from torch import Tensor
from torch.autograd import forward_ad

import opsmith

FACTOR = 3.0
x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
w = torch.tensor([1.5, 0.25, -1.0], dtype=torch.float64)


@opsmith.operator("tangents::mul")
def mul(x: Tensor, w: Tensor) -> Tensor:
    return x * w


@opsmith.operator("tangents::with_gradients")
def with_gradients(x: Tensor, w: Tensor) -> Tensor:
    return x * w


with_gradients.gradients(x=lambda grad, w: grad * w * 7, w=lambda grad, x: grad * x * 7)
for operator in (mul, with_gradients):
    operator.tangents(
        result=lambda x, w, tangent_x, tangent_w: FACTOR * (tangent_x * w + x * tangent_w),
    )


def _dual(function: Callable[..., Any]) -> Tensor:
    with forward_ad.dual_level():
        made = function(forward_ad.make_dual(x, x), w)
        tangent: Tensor = forward_ad.unpack_dual(made).tangent
    return tangent


FORWARD: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "jvp": lambda f: F.jvp(f, (x, w), (x, w))[1],
    "jacfwd": lambda f: F.jacfwd(f)(x, w),
    "dual": _dual,
    "vmap-jvp": lambda f: F.vmap(lambda a, b: F.jvp(f, (a, b), (a, b))[1])(x[None], w[None]),
    "jvp-vmap": lambda f: F.jvp(F.vmap(f), (x, w), (x, w))[1],
    "grad-of-jvp": lambda f: F.grad(lambda a: F.jvp(f, (a, w), (a, w))[1].sum())(x),
    "jacfwd-of-jvp": lambda f: F.jacfwd(lambda a: F.jvp(f, (a, w), (a, w))[1])(x),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("operator", [mul, with_gradients], ids=["alone", "with-gradients"])
def test_formula_is_in_force(operator: Callable[..., Tensor], name: str) -> None:
    plain = FORWARD[name](lambda a, b: a * b)
    torch.testing.assert_close(FORWARD[name](operator), FACTOR * plain)


@pytest.mark.compile
@pytest.mark.parametrize("tangents", marked(["from_outside"]))
def test_forward_mode_under_compile(tangents: str) -> None:
    compiled = torch.compile(lambda a, b: mul(a, b), backend="eager", fullgraph=True)
    torch.testing.assert_close(_dual(compiled), FACTOR * _dual(torch.mul))


def test_reverse_mode_does_not_use_it() -> None:
    torch.testing.assert_close(F.grad(lambda a: mul(a, w).sum())(x), w)
    torch.testing.assert_close(F.grad(lambda a: with_gradients(a, w).sum())(x), 7 * w)


def test_forward_over_reverse_uses_it_for_the_operator_inside() -> None:
    found = F.jacfwd(F.grad(lambda a: mul(a, w).square().sum()))(x)
    torch.testing.assert_close(found, FACTOR * torch.diag(2 * w * w))


def test_joint_formula_by_result_and_hidden_results() -> None:
    @opsmith.operator("tangents::norm", results={"y": ..., "scale": ...}, hidden=("scale",))
    def norm(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.square().sum().rsqrt()
        return x * scale, scale

    @norm.tangents
    def _(x: Tensor, scale: Tensor, tangent_x: Tensor) -> dict[str, Tensor]:
        moved = -(scale**3) * (x * tangent_x).sum()
        return {"y": tangent_x * scale + x * moved, "scale": moved}

    expected = F.jvp(lambda x: x / x.norm(), (x,), (w,))
    torch.testing.assert_close(F.jvp(norm, (x,), (w,)), expected)
    torch.testing.assert_close(
        F.hessian(lambda x: (norm(x) * w).sum())(x), F.hessian(lambda x: (x / x.norm() * w).sum())(x)
    )


def test_results_without_a_formula_are_derived() -> None:
    @opsmith.operator("tangents::both", results=("sin", "cos"))
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    both.gradients(x=lambda grad_sin, grad_cos, sin, cos: 5 * (grad_sin * cos - grad_cos * sin))
    both.tangents("cos")(lambda sin, tangent_x: {"cos": -FACTOR * sin * tangent_x})
    _, (sin, cos) = F.jvp(both, (x,), (w,))
    torch.testing.assert_close(sin, 5 * x.cos() * w)
    torch.testing.assert_close(cos, -FACTOR * x.sin() * w)


def test_lists_options_and_inputs_without_a_tangent() -> None:
    @opsmith.operator("tangents::total")
    def total(xs: list[Tensor], scale: Tensor | None = None, power: int = 2) -> Tensor:
        found = sum((x**power for x in xs), torch.zeros_like(xs[0]))
        return found if scale is None else found * scale

    def formula(
        xs: list[Tensor],
        scale: Tensor | None,
        power: int,
        result: Tensor,
        tangent_xs: list[Tensor],
        tangent_scale: Tensor | None,
    ) -> Tensor:
        assert (tangent_scale is None) == (scale is None)
        moved = sum(power * x ** (power - 1) * t for x, t in zip(xs, tangent_xs, strict=True))
        if scale is None or tangent_scale is None:
            return moved * FACTOR
        return FACTOR * (moved * scale + result / scale * tangent_scale)

    total.tangents(result=formula)
    calls: list[Callable[[Any, Tensor, Tensor], Tensor]] = [
        lambda f, a, b: f([a, w], b),
        lambda f, a, b: f([a, b]),
        lambda f, a, _: f([a, w], power=3),
        lambda f, _, b: f([w], b),
    ]
    for call in calls:
        expected, found = (
            F.jvp(partial(call, function), (x, w), (w, x))[1] for function in (total.reference, total)
        )
        torch.testing.assert_close(found, FACTOR * expected)


def test_answers_and_constants() -> None:
    @opsmith.operator("tangents::rounded")
    def rounded(x: Tensor, w: Tensor) -> Tensor:
        return x.round() + w

    rounded.gradients(w=opsmith.non_differentiable)
    rounded.tangents(result=lambda tangent_x, tangent_w: tangent_x + 100 * tangent_w)
    torch.testing.assert_close(F.jvp(rounded, (x, w), (w, w))[1], w)
    torch.testing.assert_close(F.jvp(lambda b: rounded(x, b), (w,), (w,))[1], torch.zeros_like(w))
    rounded.tangents(result=opsmith.zero)
    torch.testing.assert_close(F.jvp(rounded, (x, w), (w, w))[1], torch.zeros_like(w))


def test_smaller_and_real_tangents_fit_their_result() -> None:
    @opsmith.operator("tangents::complex_sum")
    def complex_sum(x: Tensor) -> Tensor:
        return torch.complex(x, x.sum().expand_as(x))

    complex_sum.tangents(result=lambda tangent_x: tangent_x.sum())
    found = F.jvp(complex_sum, (x,), (w,))[1]
    torch.testing.assert_close(found, w.sum().to(torch.complex128).expand(3))


def test_gradients_are_as_before_where_no_forward_mode_is_on() -> None:
    a = x.clone().requires_grad_()
    assert mul(a, w).grad_fn.name() == "MulBackward0"  # type: ignore[union-attr]


def test_explained() -> None:
    assert list(mul.explain(x, w).tangents) == ["result"]
    assert "tangent of `result`: formula, " in str(mul.explain(x, w))
    assert "tangent" not in str(opsmith.ops.exp.explain(x))


def test_another_formula_is_another_hash() -> None:
    from opsmith.core.source_hash import operator_hash

    @opsmith.operator("tangents::hashed")
    def hashed(x: Tensor) -> Tensor:
        return x * 2

    seen = [operator_hash(hashed.specification)]
    for factor in (1, 2):
        hashed.tangents(result=_scaled(factor))
        seen.append(operator_hash(hashed.specification))
    assert len(set(seen)) == 3


def _scaled(factor: int) -> Callable[[Tensor], Tensor]:
    return lambda tangent_x: tangent_x * factor
