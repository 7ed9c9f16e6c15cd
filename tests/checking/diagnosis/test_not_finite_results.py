"""Results that are finite where those of the reference are not, and the reverse: one finding names both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking.diagnosis import explain_difference

INF, NAN = torch.inf, torch.nan


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def logarithm(x: Tensor) -> Tensor:
    return x.log()


def surprise(x: Tensor) -> Tensor:
    return -x.log()


def numbered(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.arange(x.numel()).reshape(x.shape).to(x), -x.log())


MASKED = torch.tensor([[0.5, 1.5, -0.25], [-INF, -INF, -INF]])
ZEROS = torch.tensor([[0.0, 2.0], [0.75, 0.0], [3.0, 1.25]])

CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...], str, str]] = {
    "nan, and 0": (softmax, lambda x: x.softmax(-1).nan_to_num(0.0), (MASKED,), "0", "nan"),
    "-inf, and a number": (logarithm, lambda x: x.log().clamp(min=-100), (ZEROS,), "-100", "-inf"),
    "inf, and nan": (surprise, lambda x: torch.where(x == 0, NAN, -x.log()), (ZEROS,), "nan", "inf"),
    "inf, and several numbers": (surprise, numbered, (ZEROS,), "finite", "inf"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("case", CASES)
def test_the_finding_names_both_numbers_and_explains_the_others(case: str) -> None:
    reference, kernel, sample, got, right = CASES[case]
    operator = opsmith.operator(f"not_finite::{reference.__name__}")(reference)
    operator.kernel("cpu", kernel)
    report = opsmith.check(operator, samples=[sample], effort="quick")
    own = [each for each in report.failures if each.is_whole() and each.given == "usual"]
    assert [(each.property, each.cause, each.severity) for each in own] == [("forward", "nan", "error")]
    words = f"it is {got} where the right value is {right}, in "
    assert words in own[0].message
    assert own[0].message.endswith("; if this is intended, let the reference return the same values")
    assert not [each for each in report.failures if each.cause == "unknown"], report


@pytest.mark.parametrize("case", ["nan, and 0", "-inf, and a number"])
def test_a_kernel_that_gives_what_the_reference_gives_is_right(case: str) -> None:
    reference, _, sample, _, _ = CASES[case]
    operator = opsmith.operator(f"not_finite::right_{reference.__name__}")(reference)
    operator.kernel("cpu", lambda x: reference(x))
    assert not opsmith.check(operator, samples=[sample], effort="quick").failures


def test_a_result_that_is_nan_where_the_reference_is_finite_keeps_its_words() -> None:
    @opsmith.operator("not_finite::made")
    def made(x: Tensor) -> Tensor:
        return x.clamp(min=0.5).log()

    made.kernel("cpu", lambda x: torch.where(x < 0.5, NAN, x.clamp(min=0.5).log()))
    report = opsmith.check(made, samples=[(ZEROS,)], only=["forward"], effort="quick")
    (failure,) = report.failures
    assert (failure.cause, failure.severity) == ("nan", "error")
    assert "it is nan in 2 of 6 elements" in failure.message


def test_a_formula_that_is_finite_where_autograd_gives_nan_is_not_accused() -> None:
    @opsmith.operator("not_finite::root")
    def root(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.0).sqrt()

    def gradient(grad: Tensor, x: Tensor) -> Tensor:
        return torch.where(x > 0, grad * 0.5 / x.clamp(min=1e-30).sqrt(), 0.0)

    root.gradients(x=gradient)
    report = opsmith.check(root, samples=[(torch.tensor([0.5, -1.0, 2.0]),)], only=["gradient"])
    assert not report.failures, report


def test_nan_that_a_kernel_hides_at_a_special_value_is_a_warning_of_the_same_cause() -> None:
    @opsmith.operator("not_finite::hidden")
    def hidden(x: Tensor) -> Tensor:
        return x * 2

    hidden.kernel("cpu", lambda x: (x * 2).nan_to_num(0.0))
    report = opsmith.check(hidden, samples=[(torch.tensor([0.5, -1.0, 2.0]),)], effort="quick")
    found = {(each.property, each.cause, each.severity) for each in report.failures}
    assert found == {("values", "nan", "warning")}, report


FINITE: Any = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("got", "expected", "words"),
    [
        (
            [0.0, 0, 3, 4],
            [NAN, INF, 3, 4],
            "it is 0 where the right value is nan or infinite, in 2 of 4 elements",
        ),
        ([INF, 2, 3, 4], [-INF, 2, 3, 4], "it is inf where the right value is -inf, in 1 of 4 elements"),
        (
            [NAN, INF, 3, 4],
            [INF, NAN, 3, 4],
            "it is nan or infinite where the right value is nan or infinite",
        ),
        ([INF, -INF, 3, 4], [NAN, NAN, 3, 4], "it is infinite where the right value is nan"),
        ([0.0, 2, 3, NAN], [NAN, 2, 3, 4], "it is nan in 1 of 4 elements; it is 0 where"),
    ],
)
def test_words_of_a_difference(got: list[float], expected: list[float], words: str) -> None:
    cause, reason = explain_difference(torch.tensor(got), torch.tensor(expected))
    assert cause == "nan"
    assert words in reason


def test_wrong_numbers_beside_it_are_diagnosed_as_well() -> None:
    expected = torch.tensor([1.0, 2, 3, NAN, 5, 7, 11])
    cause, reason = explain_difference(-expected.nan_to_num(0.0), expected)
    assert cause == "sign"
    assert (
        "it is the right tensor times -1; it is 0 where the right value is nan, in 1 of 7 elements" in reason
    )
