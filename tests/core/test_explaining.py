"""`explain` says what a call would run, whole."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors


def place(function: Callable[..., Any]) -> str:
    return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def doubled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


ARGS = torch.ones(2), torch.ones(2)


def says(operator: opsmith.Operator[..., Any], text: str, *args: Any) -> None:
    assert str(operator.explain(*(args or ARGS))) == textwrap.dedent(text).strip()


def test_ordinary(name: str) -> None:
    says(
        opsmith.operator(name)(scaled),
        f"""
        {name}
          forward: reference, {place(scaled)}
          gradient of `x`: ordinary autograd of the reference
          gradient of `weight`: ordinary autograd of the reference
          saved for the backward: the tensors that the operations of the reference save
        """,
    )


def test_formulas_and_a_derived_gradient(name: str) -> None:
    formula = lambda grad, weight: grad * weight
    says(
        opsmith.operator(name)(scaled).gradients(x=formula),
        f"""
        {name}
          forward: reference, {place(scaled)}
          gradient of `x`: formula, {place(formula)}
          gradient of `weight`: derived: the reference, run again
          saved for the backward: x, weight
          the backward runs the function that gradients are derived from
        """,
    )


def test_all_formulas(name: str) -> None:
    of_x = lambda grad, weight: grad * weight
    of_weight = lambda grad, result: grad * result
    says(
        opsmith.operator(name)(scaled).gradients(x=of_x, weight=of_weight),
        f"""
        {name}
          forward: reference, {place(scaled)}
          gradient of `x`: formula, {place(of_x)}
          gradient of `weight`: formula, {place(of_weight)}
          saved for the backward: weight, result
        """,
    )


def test_joint_formula(name: str) -> None:
    def joint(grad: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"x": grad * weight, "weight": grad * x}

    says(
        opsmith.operator(name)(scaled).gradients(joint),
        f"""
        {name}
          forward: reference, {place(scaled)}
          gradient of `x`: joint formula, {place(joint)}
          gradient of `weight`: joint formula, {place(joint)}
          saved for the backward: x, weight
        """,
    )


def test_answers(name: str) -> None:
    def three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x + y + z

    says(
        opsmith.operator(name)(three).gradients(
            x=opsmith.zero, y=opsmith.non_differentiable, z=opsmith.not_implemented("not yet")
        ),
        f"""
        {name}
          forward: reference, {place(three)}
          gradient of `x`: opsmith.zero
          gradient of `y`: none: non-differentiable
          gradient of `z`: opsmith.not_implemented('not yet')
          saved for the backward: nothing
        """,
        *ARGS,
        torch.ones(2),
    )


def test_surrogate(name: str) -> None:
    formula = lambda grad: grad
    says(
        opsmith.operator(name)(scaled).surrogate_gradients(doubled, x=formula),
        f"""
        {name}
          forward: reference, {place(scaled)}
          gradient of `x`: surrogate formula, {place(formula)}
          gradient of `weight`: derived from the stand-in, {place(doubled)}
          saved for the backward: x, weight
          the backward runs the function that gradients are derived from
        """,
    )


def test_opaque(name: str) -> None:
    formula = lambda grad, weight: grad * weight
    says(
        opsmith.operator(name, opaque=True)(scaled).gradients(x=formula),
        f"""
        {name}
          forward: reference, {place(scaled)}
          gradient of `x`: formula, {place(formula)}
          gradient of `weight`: none: the operator is opaque and no formula is given
          saved for the backward: weight
        """,
    )


def test_kernel_in_force(name: str) -> None:
    says(
        opsmith.operator(name)(scaled).kernel("cpu", doubled),
        f"""
        {name}
          forward: kernel for cpu, {place(doubled)}
          gradient of `x`: derived: the reference, run again
          gradient of `weight`: derived: the reference, run again
          saved for the backward: x, weight
          the backward runs the function that gradients are derived from
        """,
    )


def test_the_kernel_of_a_call_is_data(name: str) -> None:
    operator = opsmith.operator(name)(scaled).kernel("cuda", doubled)
    assert operator.explain(*ARGS).kernel is None
    operator.kernel("cpu", doubled)
    kernel = operator.explain(*ARGS).kernel
    assert kernel is not None
    assert (kernel.device, kernel.function) == ("cpu", doubled)


def test_rejected_kernels(name: str) -> None:
    operator = opsmith.operator(name)(scaled).kernel("cuda", doubled)
    operator.kernel("cpu", doubled, dtypes=[torch.float64])
    says(
        operator,
        f"""
        {name}
          forward: reference, {place(scaled)}
            rejected: kernel for cpu, {place(doubled)}: it does not take torch.float32
            rejected: kernel for cuda, {place(doubled)}: a tensor is on cpu
          gradient of `x`: ordinary autograd of the reference
          gradient of `weight`: ordinary autograd of the reference
          saved for the backward: the tensors that the operations of the reference save
        """,
    )


def test_hidden_results(name: str) -> None:
    def squares(x: Tensor) -> tuple[Tensor, Tensor]:
        return x**2, 2 * x

    formula = lambda grad, slope: grad * slope
    says(
        opsmith.operator(name, hidden=("slope",))(squares).gradients(x=formula),
        f"""
        {name}
          forward: reference, {place(squares)}
          gradient of `x`: formula, {place(formula)}
          saved for the backward: x, slope
        """,
        torch.ones(2),
    )


def test_nothing_runs(name: str) -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("it ran")

    operator = opsmith.operator(name)(never).kernel("cpu", never).gradients(x=never)
    explained = operator.explain(torch.ones(2))
    assert explained.operator == name
    assert list(explained.gradients) == ["x"]


def test_wrong_calls_are_refused_as_in_a_call(name: str) -> None:
    with pytest.raises(errors.ArgumentError, match="`weight` is missing"):
        opsmith.operator(name)(scaled).explain(torch.ones(2))
