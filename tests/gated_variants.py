"""One function of mathematics, declared as an operator in every way that gradients can be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import opsmith

Declare = Callable[[str], opsmith.Operator[..., Any]]


def gated(x: Tensor, weight: Tensor, by: float = 1.5) -> Tensor:
    """y = by x³ tanh(weight).  x [B, N], weight [N] -> [B, N]."""
    return by * x**3 * torch.tanh(weight)


def gated_and_hidden(x: Tensor, weight: Tensor, by: float = 1.5) -> tuple[Tensor, Tensor]:
    gate = torch.tanh(weight)
    return by * x**3 * gate, gate


def gated_kernel(x: Tensor, weight: Tensor, by: float) -> Tensor:
    return x**3 * torch.tanh(weight) * by


def gradient_of_x(grad: Tensor, x: Tensor, weight: Tensor, by: float) -> Tensor:
    return grad * 3 * by * x**2 * torch.tanh(weight)


def gradient_of_weight(grad: Tensor, x: Tensor, weight: Tensor, by: float) -> Tensor:
    return grad * by * x**3 / torch.cosh(weight) ** 2  # reduced over B by opsmith


def every_gradient(grad: Tensor, x: Tensor, weight: Tensor, by: float) -> dict[str, Tensor]:
    return {"x": gradient_of_x(grad, x, weight, by), "weight": gradient_of_weight(grad, x, weight, by)}


def _ordinary(name: str) -> opsmith.Operator[..., Any]:
    return opsmith.operator(name)(gated)


def _derived_with_a_kernel(name: str) -> opsmith.Operator[..., Any]:
    return opsmith.operator(name)(gated).kernel("cpu", gated_kernel)


def _formulas(name: str) -> opsmith.Operator[..., Any]:
    return opsmith.operator(name)(gated).gradients(x=gradient_of_x, weight=gradient_of_weight)


def _formulas_with_a_kernel(name: str) -> opsmith.Operator[..., Any]:
    return _formulas(name).kernel("cpu", gated_kernel)


def _one_formula(name: str) -> opsmith.Operator[..., Any]:
    return opsmith.operator(name)(gated).gradients(x=gradient_of_x)


def _other_formula_with_a_kernel(name: str) -> opsmith.Operator[..., Any]:
    return opsmith.operator(name)(gated).gradients(weight=gradient_of_weight).kernel("cpu", gated_kernel)


def _joint(name: str) -> opsmith.Operator[..., Any]:
    return opsmith.operator(name)(gated).gradients(every_gradient)


def _joint_of_one(name: str) -> opsmith.Operator[..., Any]:
    operator = opsmith.operator(name)(gated)

    @operator.gradients("weight")
    def _(grad: Tensor, x: Tensor, weight: Tensor, by: float) -> dict[str, Tensor]:
        return {"weight": gradient_of_weight(grad, x, weight, by)}

    return operator


def _hidden(name: str) -> opsmith.Operator[..., Any]:
    return opsmith.operator(name, hidden=("gate",))(gated_and_hidden).gradients(
        x=lambda grad, x, by, gate: grad * 3 * by * x**2 * gate,
        weight=lambda grad, x, by, gate: grad * by * x**3 * (1 - gate**2),
    )


def _hidden_in_one_formula(name: str) -> opsmith.Operator[..., Any]:
    return opsmith.operator(name, hidden=("gate",))(gated_and_hidden).gradients(
        x=lambda grad, x, by, gate: grad * 3 * by * x**2 * gate
    )


def _stand_in(name: str) -> opsmith.Operator[..., Any]:
    return opsmith.operator(name)(gated).surrogate_gradients(gated)


def _gradients_that_are_operators(name: str) -> opsmith.Operator[..., Any]:
    of_x = opsmith.operator(f"{name}_x")(_gradient_kernel_of_x)
    of_weight = opsmith.operator(f"{name}_weight")(_gradient_kernel_of_weight)
    return opsmith.operator(name)(gated).gradients(
        x=lambda grad, x, weight, by: of_x(grad, x, weight, by),
        weight=lambda grad, x, weight, by: of_weight(grad, x, weight, by),
    )


def _gradient_kernel_of_x(g: Tensor, x: Tensor, weight: Tensor, by: float) -> Tensor:
    return gradient_of_x(g, x, weight, by)


def _gradient_kernel_of_weight(g: Tensor, x: Tensor, weight: Tensor, by: float) -> Tensor:
    return gradient_of_weight(g, x, weight, by)


VARIANTS: Mapping[str, Declare] = {
    "ordinary": _ordinary,
    "derived-kernel": _derived_with_a_kernel,
    "formulas": _formulas,
    "formulas-kernel": _formulas_with_a_kernel,
    "one-formula": _one_formula,
    "other-formula-kernel": _other_formula_with_a_kernel,
    "joint": _joint,
    "joint-of-one": _joint_of_one,
    "hidden": _hidden,
    "hidden-in-one": _hidden_in_one_formula,
    "stand-in": _stand_in,
    "gradient-operators": _gradients_that_are_operators,
}
