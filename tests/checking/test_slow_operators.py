"""A slow operator is tried on fewer inputs, and a limit says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking import Failure
from opsmith.checking.effort import EFFORTS
from opsmith.checking.processes import watchdog


class Clock:
    """A clock on which each call of `square` takes some seconds, and nothing else does."""

    seconds = now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now


@opsmith.operator("slow_operators::square")
def square(x: Tensor) -> Tensor:
    Clock.now += Clock.seconds
    return x * x


SAMPLES = [(torch.randn(3, 4),), (torch.randn(5),)]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Failure]]:
    def limits(seconds: float, effort: Any = "quick", *, only: Sequence[str] = FAST) -> list[Failure]:
        monkeypatch.setattr(watchdog, "time", Clock)
        monkeypatch.setattr(Clock, "seconds", seconds)
        report = opsmith.check(square, samples=SAMPLES, only=only, effort=effort)
        assert not report.errors
        return [each for each in report.failures if each.cause == "not-exercised"]

    return limits


FAST = ("forward", "gradient")


def test_inputs_that_no_time_is_left_for_are_a_limit_in_each_property(limits: Any) -> None:
    found = limits(25.0)
    assert [(each.property, each.severity) for each in found] == [("forward", "limit"), ("gradient", "limit")]
    assert "inputs were left out or not finished after 60 s" in found[0].message


def test_one_input_that_takes_too_long_is_not_finished(limits: Any) -> None:
    """As second order by differences, which runs the first input many hundred times."""
    (found,) = limits(20.0, only=["second_order"])
    assert found.severity == "limit"


def test_what_is_fast_leaves_nothing_out(limits: Any) -> None:
    assert not limits(0.0001)


def test_more_seconds_leave_nothing_out(limits: Any) -> None:
    assert not limits(25.0, replace(EFFORTS["quick"], seconds=1e9))


class SlowlyWrong(torch.autograd.Function):
    """Each call takes some seconds; its gradient is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Clock.now += Clock.seconds
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


def test_a_wrong_gradient_is_reported_where_no_time_is_left_for_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "time", Clock)
    reasons = set()
    for seconds in (0.05, 0.15, 0.2, 0.225, 0.25, 0.275):
        monkeypatch.setattr(Clock, "seconds", seconds)
        report = opsmith.check(SlowlyWrong, samples=SAMPLES[:1], only=["gradient"], effort="quick")
        reasons |= {"no time was left" in each.message for each in report.errors}
    assert reasons == {False, True}
