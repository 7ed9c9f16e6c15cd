"""Checks of classes that write in place."""

from __future__ import annotations

from typing import Any

import pytest
from dirty_classes import CASES, ByHelper, Case, Doubles, numbers, one
from torch import Tensor

import opsmith

CHECKED = [
    "forward",
    "mutation",
    "gradient",
    "second_order",
    "layouts",
    "vmap",
    "forward_mode",
    "fake",
    "effects",
]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.slow if name in ("with_sign", "sigmoid") else ())
        for name, case in CASES.items()
        if name not in ("marks", "wholes", "clips_not")
    ],
)
def test_checked(case: Case) -> None:
    operator = case.operator
    report = opsmith.check(operator, samples=[case.make()], only=CHECKED, effort="quick")
    assert not report.failures, report
    status = {outcome.property: outcome.status for outcome in report.outcomes}
    assert status["mutation"] == status["gradient"] == "passed"


def test_a_check_finds_a_gradient_that_is_wrong_after_a_write() -> None:
    class Wrong(Doubles):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 3 * grad

    operator = opsmith.adopt(Wrong, "dirty::wrong")
    report = opsmith.check(operator, samples=[one()], only=["gradient"], effort="quick")
    assert [(each.input, each.cause) for each in report.failures] == [("x", "scale")]


@pytest.mark.slow
def test_a_check_that_calls_it_first_learns_what_it_writes() -> None:
    operator = opsmith.adopt(ByHelper, "dirty::checked_first")
    report = opsmith.check(operator, samples=[(numbers(3, 4), True)], only=["forward", "effects", "mutation"])
    assert not report.failures, report
    assert [each.status for each in report.outcomes if each.property == "mutation"] == ["passed"]


class ReturnsACopy(Doubles):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x * 1


def test_a_check_reports_what_the_first_call_refuses() -> None:
    operator = opsmith.adopt(ReturnsACopy, "dirty::reported")
    report = opsmith.check(operator, samples=[(numbers(3),)], only=["forward"], effort="quick")
    assert "marks `x` as dirty but does not return it" in str(report)


def test_a_check_of_the_class_itself_looks_at_apply() -> None:
    report = opsmith.check(Doubles, samples=[one()], only=["forward", "effects", "gradient"], effort="quick")
    assert not report.failures, report
    assert report.operator.endswith("Doubles")
