"""A wrong result of a kernel makes gradients wrong that are made of it; their formulas are right."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import opsmith


def roots(operator: Any) -> list[tuple[str, str | None]]:
    """Property and input of the errors that follow from no other."""
    report = opsmith.check(operator, effort="quick", isolate=False)
    return [
        (each.property, each.input)
        for each in report.failures
        if each.follows is None and each.severity == "error"
    ]


def standardise(name: str, *, wrong_kernel: bool, wrong_formula: bool) -> Any:
    @opsmith.operator(f"saved::{name}", hidden=("rstd",))
    def standardise(x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x * rstd, rstd

    by = 2 if wrong_formula else 1
    standardise.gradients(
        x=lambda grad, x, rstd: rstd * (grad - by * x * rstd.square() * (grad * x).mean(-1, keepdim=True))
    )

    @standardise.kernel("cpu")
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x * rstd, rstd * 1.5 * x.mean(-1, keepdim=True) if wrong_kernel else rstd

    standardise.samples(lambda make: [(make(3, 5),)])
    return standardise


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("name", "wrong_kernel", "wrong_formula", "expected"),
    [
        ("kernel", True, False, [("forward", "rstd")]),
        ("formula", False, True, [("gradient", "x")]),
        ("both", True, True, [("forward", "rstd"), ("gradient", "x")]),
        ("right", False, False, []),
    ],
)
def test_a_hidden_result(
    name: str, wrong_kernel: bool, wrong_formula: bool, expected: list[tuple[str, str]]
) -> None:
    operator = standardise(name, wrong_kernel=wrong_kernel, wrong_formula=wrong_formula)
    assert roots(operator) == expected


def test_the_message_names_the_result() -> None:
    operator = standardise("message", wrong_kernel=True, wrong_formula=False)
    report = opsmith.check(operator, effort="quick", only=["forward", "gradient"], isolate=False)
    forward, gradient = report.failures
    assert (forward.property, forward.input, forward.cause) == ("forward", "rstd", "kernel-mismatch")
    assert "`rstd` from the kernel for cpu is wrong" in forward.message
    assert gradient.follows == "forward"
    assert gradient.message.endswith("its formula is right with the `rstd` of the reference")


def test_a_visible_result_and_a_joint_formula() -> None:
    @opsmith.operator("saved::tempered")
    def tempered(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).exp()

    @tempered.gradients("x", "scale")
    def _(grad: Tensor, x: Tensor, scale: Tensor, result: Tensor) -> dict[str, Tensor]:
        return {"x": grad * result * scale, "scale": grad * result * x}

    tempered.kernel("cpu", lambda x, scale: (x * scale).exp() + x.sign() * 0.25)
    tempered.samples(lambda make: [(make(3, 4), make(4))])
    assert roots(tempered) == [("forward", "result")]


@pytest.mark.slow
def test_a_list_of_hidden_results() -> None:
    @opsmith.operator("saved::listed", hidden=("kept",))
    def listed(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x.sin(), [x.cos(), x.sin()]

    listed.gradients(x=lambda grad, kept: grad * kept[0])
    listed.kernel("cpu", lambda x: (x.sin(), [x.cos() * 0.5 + x.sign() * 0.1, x.sin()]))
    listed.samples(lambda make: [(make(3, 4),)])
    assert roots(listed) == [("forward", "kept[0]")]
