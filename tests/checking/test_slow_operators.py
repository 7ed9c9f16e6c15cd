"""A slow operator is tried on fewer inputs, and a limit says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking import property as property_module
from opsmith.checking.effort import EFFORTS


class Clock:
    """A clock on which each look takes some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now


@opsmith.operator("slow_operators::square")
def square(x: Tensor) -> Tensor:
    return x * x


SAMPLES = [(torch.randn(3, 4),), (torch.randn(5),)]


def limits(monkeypatch: pytest.MonkeyPatch, seconds: float, effort: Any) -> list[Any]:
    monkeypatch.setattr(property_module, "time", Clock(seconds))
    report = opsmith.check(square, samples=SAMPLES, only=["forward", "gradient"], effort=effort)
    assert report.passed_as_asked
    return [each for each in report.failures if each.cause == "not-exercised"]


def test_inputs_that_no_time_is_left_for_are_a_limit_in_each_property(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = limits(monkeypatch, 100.0, "quick")
    assert [(each.property, each.severity) for each in found] == [("forward", "limit"), ("gradient", "limit")]
    count = len(opsmith.check(square, samples=SAMPLES, only=["forward"], effort="quick").inputs)
    assert found[0].message.startswith(
        f"{count - 1} of {count} inputs were left out, for the others took 60 s"
    )


def test_what_is_fast_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not limits(monkeypatch, 0.01, "quick")


def test_more_seconds_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not limits(monkeypatch, 50.0, replace(EFFORTS["quick"], seconds=1e6))
