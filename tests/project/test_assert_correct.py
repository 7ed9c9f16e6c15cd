"""`opsmith.testing.assert_correct`: every option of check, a class, and the whole report as its message."""

from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.testing import assert_correct

FAST = ["forward", "gradient"]


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * grad


class Backwards(Thrice):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -3 * grad


SAMPLES = [(torch.rand(3, dtype=torch.float64),)]


def test_a_function_class_can_be_asserted_correct() -> None:
    report = assert_correct(Thrice, samples=SAMPLES, only=FAST)
    assert (report.operator, report.passed) == ("Thrice", True)


def test_the_message_is_the_whole_report() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_correct(Backwards, samples=SAMPLES, only=FAST, seed=3, effort="quick")
    message = str(raised.value)
    report = opsmith.check(Backwards, samples=SAMPLES, only=FAST, seed=3, effort="quick")
    assert message.splitlines()[0] == "Backwards: FAILED: gradient; 1 error" == str(report).splitlines()[0]
    for failure in report.failures:
        assert str(failure) in message
    assert "seed 3, quick effort" in message


@pytest.mark.slow
def test_every_option_of_check_is_passed_on() -> None:
    told: list[str] = []
    report = assert_correct(
        Thrice,
        samples=lambda: SAMPLES,
        skip=["gradient"],
        only=FAST,
        seed=5,
        effort="quick",
        progress=lambda name, done, total: told.append(name),
        isolate=60,
    )
    assert (report.seed, report.effort, report.passed_as_asked, report.passed) == (5, "quick", True, False)
    assert "forward" in told


def test_what_could_not_be_checked_is_an_error_and_no_failure() -> None:
    with pytest.raises(errors.MissingSamplesError):
        assert_correct(Thrice)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sead'"):
        assert_correct(Thrice, samples=SAMPLES, sead=1)
