"""Messages of tangent formulas: what they are given for, what they ask for, what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import opsmith
from opsmith import errors

AS_TORCH = (
    "write the formula with torch operations or opsmith operators: then a second-order derivative exists; "
    "if the tangent is zero, give `opsmith.zero`"
)
Place = Callable[[Callable[..., Any]], str]
x = torch.arange(6.0).reshape(2, 3)


def in_forward_mode(operator: Callable[..., Any]) -> None:
    """Call an operator with a tangent."""
    with forward_ad.dual_level():
        operator(forward_ad.make_dual(x, x.clone()))


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.argmax()


def test_no_such_result(name: str, place: Place, says: Any) -> None:
    with says(
        errors.UnknownResultError,
        f"""
        {name}: a tangent is given for `x`, which is not a result
          argument: x
          expected: one of `result`
          where: {place(scaled)}
          hint: name the tangent after a result: gradients belong to inputs, tangents to results
        """,
    ):
        opsmith.operator(name)(scaled).tangents(x=lambda tangent_x: tangent_x)


def test_result_without_a_tangent(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name, results={"y": ..., "index": opsmith.non_differentiable})(split)
    with says(
        errors.NotDifferentiableError,
        f"""
        {name}: a tangent is given for `index`, which is declared non-differentiable
          argument: index
          expected: one of `y`
          where: {place(split)}
          hint: leave `index` out, or change its role in `results=`
        """,
    ):
        operator.tangents(index=lambda tangent_x: tangent_x)


def test_no_formula(name: str, place: Place, says: Any) -> None:
    with says(
        errors.FormulaError,
        f"""
        {name}: the tangent of `result` is neither a function nor a value that replaces a function
          argument: result
          expected: a function, or opsmith.zero or .not_implemented(...)
          got: opsmith.non_differentiable
          where: {place(scaled)}
          hint: write `result=lambda tangent_x: ...`
        """,
    ):
        opsmith.operator(name)(scaled).tangents(result=opsmith.non_differentiable)


def test_two_ways_at_once(name: str, place: Place, says: Any) -> None:
    def formula(tangent_x: Tensor) -> dict[str, Tensor]:
        return {"result": tangent_x}

    with says(
        errors.FormulaError,
        f"""
        {name}: `tangents` mixes ways to give formulas in one call
          expected: one joint formula, or names of results, or `name=formula` for each result
          got: {place(formula)}, result=...
          where: {place(scaled)}
          hint: call `tangents` once for each way
        """,
    ):
        opsmith.operator(name)(scaled).tangents(formula, result=formula)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("formula", "asked", "hint"),
    [
        pytest.param(
            lambda grad: grad,
            "grad",
            "forward mode has tangents instead of gradients: `tangent_x`",
            id="gradient",
        ),
        pytest.param(
            lambda tangent: tangent, "tangent", "each tensor has its own tangent: `tangent_x`", id="bare"
        ),
        pytest.param(
            lambda tangent_by: tangent_by,
            "tangent_by",
            "each tensor has its own tangent: `tangent_x`",
            id="no-tensor",
        ),
        pytest.param(lambda tangentx: tangentx, "tangentx", "did you mean `tangent_x`?", id="misspelt"),
    ],
)
def test_parameter_without_a_meaning(
    formula: Any, asked: str, hint: str, name: str, place: Place, says: Any
) -> None:
    with says(
        errors.FormulaParameterError,
        f"""
        {name}: the tangent of `result` names `{asked}`, which is not an input, result or tangent of an input
          argument: {asked}
          expected: one of `x`, `by`, `result`, `tangent_x`
          where: {place(formula)}
          hint: {hint}
        """,
    ):
        opsmith.operator(name)(scaled).tangents(result=formula)


RETURNED: dict[str, tuple[Any, type[errors.OpsmithError], str, str, str, str]] = {
    "type": (
        lambda tangent_x: 1.0,
        errors.GradientTypeError,
        "is not a tensor",
        "a tensor of shape [2, 3]",
        "float 1.0",
        "return a tensor, or `opsmith.zero` if the tangent is zero",
    ),
    "shape": (
        lambda tangent_x: tangent_x[:, :2],
        errors.GradientShapeError,
        "has the wrong shape",
        "[2, 3], or a shape that broadcasts to it",
        "[2, 2]",
        "check which dimensions the result has",
    ),
    "dtype": (
        lambda tangent_x: tangent_x.double(),
        errors.GradientDtypeError,
        "has the wrong dtype",
        "torch.float32",
        "torch.float64",
        "make new tensors with `dtype=result.dtype`, without casts",
    ),
    "complex": (
        lambda tangent_x: tangent_x * 1j,
        errors.GradientDtypeError,
        "has the wrong dtype",
        "torch.float32",
        "torch.complex64",
        "make new tensors with `dtype=result.dtype`, without casts",
    ),
    "device": (
        lambda tangent_x: tangent_x.to("meta"),
        errors.GradientDeviceError,
        "is on the wrong device",
        "cpu",
        "meta",
        "make new tensors with `device=result.device`",
    ),
}


@pytest.mark.parametrize(
    ("formula", "kind", "problem", "expected", "got", "hint"), RETURNED.values(), ids=RETURNED
)
def test_answer_that_does_not_fit(
    formula: Any,
    kind: Any,
    problem: str,
    expected: str,
    got: str,
    hint: str,
    name: str,
    place: Place,
    says: Any,
) -> None:
    operator = opsmith.operator(name)(scaled).tangents(result=formula)
    with says(
        kind,
        f"""
        {name}: the tangent of `result` {problem}
          argument: result
          expected: {expected}
          got: {got}
          where: {place(formula)}
          hint: {hint}
        """,
    ):
        in_forward_mode(operator)


def test_joint_tangent_without_an_answer(name: str, place: Place, says: Any) -> None:
    def formula(tangent_x: Tensor) -> Any:
        return tangent_x

    operator = opsmith.operator(name)(scaled).tangents(formula)
    with says(
        errors.GradientCountError,
        f"""
        {name}: the joint tangent does not return a tangent for each result that it covers
          expected: a dict with `result`
          got: Tensor
          where: {place(formula)}
          hint: return a dict by result name; cover fewer results with `@op.tangents('y', ...)`
        """,
    ):
        in_forward_mode(operator)


def test_formula_that_writes(name: str, place: Place, says: Any) -> None:
    def formula(tangent_x: Tensor) -> Tensor:
        return tangent_x.mul_(2)

    operator = opsmith.operator(name)(scaled).tangents(result=formula)
    with says(
        errors.SavedTensorModifiedError,
        f"""
        {name}: a tangent formula wrote into `tangent_x`
          argument: tangent_x
          where: {place(formula)}
          hint: work on a copy, `tangent_x.clone()`, or use an operation without a trailing `_`
        """,
    ):
        in_forward_mode(operator)


def test_not_implemented(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(scaled).tangents(result=opsmith.not_implemented("no adjoint"))
    with says(
        errors.GradientNotImplementedError,
        f"""
        {name}: the tangent of `result` is not implemented: no adjoint
          argument: result
          where: {place(scaled)}
          hint: use reverse mode, or give a formula: `.tangents(result=...)`
        """,
    ):
        in_forward_mode(operator)


def test_formula_that_leaves_the_graph(name: str, place: Place, says: Any) -> None:
    def formula(tangent_x: Tensor) -> Tensor:
        return torch.from_numpy(tangent_x.detach().numpy() * 2)

    operator = opsmith.operator(name)(scaled).tangents(result=formula)
    tangent = x.clone().requires_grad_()
    with (
        forward_ad.dual_level(),
        says(
            errors.GraphCutError,
            f"""
        {name}: torch cannot see that the tangent of `result` depends on the tangents of the inputs
          argument: result
          where: {place(formula)}
          hint: {AS_TORCH}
        """,
        ),
    ):
        forward_ad.unpack_dual(operator(forward_ad.make_dual(x, tangent))).tangent.sum().backward()


def test_error_inside_a_formula_says_which(name: str) -> None:
    operator = opsmith.operator(name)(scaled).tangents(result=lambda tangent_x: tangent_x @ tangent_x)
    with pytest.raises(RuntimeError) as caught:
        in_forward_mode(operator)
    assert any(f"raised in the tangent of `result` of {name}, " in note for note in caught.value.__notes__)


def halves(x: Tensor) -> list[Tensor]:
    return [x / 2, x / 2]


@pytest.mark.parametrize(
    ("formula", "got"),
    [
        (lambda tangent_x: [tangent_x / 2], "a list of 1"),
        (lambda tangent_x: (tangent_x / 2,) * 3, "a list of 3"),
        (lambda tangent_x: tangent_x / 2, "Tensor"),
    ],
    ids=["too-few", "too-many", "no-list"],
)
def test_tangent_of_a_list(formula: Callable[..., Any], got: str, name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(halves).tangents(result=formula)
    with says(
        errors.GradientCountError,
        f"""
        {name}: the tangent of the list `result` has the wrong length
          argument: result
          expected: a list of 2 tensors
          got: {got}
          where: {place(formula)}
          hint: return one tangent for each tensor of the list
        """,
    ):
        in_forward_mode(operator)
