"""Rules that an author gives for an adopted class hold in each call, beside those of the class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

import opsmith


class Scale(Function):
    """A product."""

    @staticmethod
    def forward(ctx: Any, x: Any, cos: Any) -> Any:
        ctx.save_for_backward(x, cos)
        return x * cos

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, cos = ctx.saved_tensors
        return grad * cos, grad * x


HUNDREDFOLD = {"x": lambda grad, cos: 100 * grad * cos}
CONSTANT = {"cos": opsmith.non_differentiable}
ZERO = {"cos": opsmith.zero}
REFUSED = {"cos": opsmith.not_implemented("nobody needs it")}
RULES: dict[str, tuple[dict[str, Any], list[float], list[float] | None]] = {
    "formula": (HUNDREDFOLD, [300.0, 300.0], [2.0, 2.0]),
    "constant": (CONSTANT, [3.0, 3.0], None),
    "both": (HUNDREDFOLD | CONSTANT, [300.0, 300.0], None),
    "zero": (ZERO, [3.0, 3.0], [0.0, 0.0]),
}
SIGNATURE = "(x: Tensor, cos: Tensor) -> Tensor"


def inputs() -> tuple[Tensor, Tensor]:
    return torch.full((2,), 2.0, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)


def gradients(operator: Any, x: Tensor, cos: Tensor) -> list[list[float] | None]:
    found = torch.autograd.grad(operator(x, cos).sum(), (x, cos), allow_unused=True)
    return [None if each is None else each.tolist() for each in found]


@pytest.mark.parametrize("signature", [None, SIGNATURE], ids=["learned", "signature"])
@pytest.mark.parametrize("name", RULES)
def test_each_call_goes_back_by_the_rules(name: str, signature: str | None) -> None:
    rules, by_x, by_cos = RULES[name]
    operator = opsmith.adopt(Scale, f"authors::{name}_{signature is None}", signature=signature)
    operator.gradients(**rules)
    x, cos = inputs()
    assert [gradients(operator, x, cos) for _ in range(4)] == [[by_x, by_cos]] * 4
    assert torch.autograd.grad(operator(x, cos.detach()).sum(), x)[0].tolist() == by_x
    by_func = torch.func.grad(lambda x, cos: operator(x, cos).sum(), argnums=(0, 1))(x.detach(), cos.detach())
    assert [each.tolist() for each in by_func] == [by_x, by_cos or [0.0, 0.0]]
    second = torch.autograd.grad(operator(x, cos).sum(), x, create_graph=True)[0]
    expected = by_x[0] / 3
    if name in ("formula", "zero"):
        assert torch.autograd.grad(second.sum(), cos)[0].tolist() == [expected, expected]


@pytest.mark.slow
@pytest.mark.xdist_group("subject")
@pytest.mark.parametrize("name", RULES)
def test_compiled_code_goes_back_by_the_rules(name: str) -> None:
    rules, by_x, by_cos = RULES[name]
    operator = opsmith.adopt(Scale, f"authors::compiled_{name}", signature=SIGNATURE).gradients(**rules)
    x, cos = inputs()
    compiled = torch.compile(lambda x, cos: operator(x, cos), backend="aot_eager", fullgraph=True)
    assert gradients(compiled, x, cos) == [by_x, by_cos]


def test_a_refusal_holds_in_later_calls() -> None:
    operator = opsmith.adopt(Scale, "authors::refused").gradients(**REFUSED)
    x, cos = inputs()
    for _ in range(3):
        with pytest.raises(opsmith.errors.GradientNotImplementedError, match="nobody needs it"):
            gradients(operator, x, cos)
        assert torch.autograd.grad(operator(x, cos.detach()).sum(), x)[0].tolist() == [3.0, 3.0]


def test_a_tangent_of_the_author_holds_in_later_calls() -> None:
    operator = opsmith.adopt(Scale, "authors::tangents")
    operator.tangents(result=lambda tangent_x, cos: 100 * tangent_x * cos)
    for _ in range(3):
        with forward_ad.dual_level():
            moved = operator(
                forward_ad.make_dual(torch.full((2,), 2.0), torch.ones(2)), torch.full((2,), 3.0)
            )
            assert forward_ad.unpack_dual(moved).tangent.tolist() == [300.0, 300.0]


def test_a_joint_formula_leaves_inputs_with_a_rule_of_their_own() -> None:
    @opsmith.operator("authors::joint")
    def joint(x: Tensor, cos: Tensor) -> Tensor:
        return x * cos

    asked: list[frozenset[str]] = []

    @joint.gradients
    def _(grad: Tensor, x: Tensor, cos: Tensor, grads_needed: frozenset[str]) -> dict[str, Tensor]:
        asked.append(grads_needed)
        return {"x": grad * cos, "cos": grad * x}

    joint.gradients(**HUNDREDFOLD)
    x, cos = inputs()
    assert [gradients(joint, x, cos) for _ in range(4)] == [[[300.0, 300.0], [2.0, 2.0]]] * 4
    assert {*asked} == {frozenset({"cos"})}
