"""Benchmarks that take next to no time: what they measure is no test's business."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from briefly import BRIEF, passed

import opsmith
from opsmith.benchmarking import Benchmark, clock, machine


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SIDES", {"cpu": 32})
    monkeypatch.setattr(machine, "FOOTPRINTS", (1 << 12, 1 << 16))
    monkeypatch.setattr(machine, "TURN_S", 1e-5)
    monkeypatch.setattr(clock, "PAUSE_S", 1e-5)
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)


@pytest.fixture
def measure() -> Callable[..., Benchmark]:
    """Measure an operator as briefly as can be, without a compiler, as if it had passed its check."""

    def measure(operator: opsmith.Operator[..., Any], **options: Any) -> Benchmark:
        given = {"effort": BRIEF, "compiled": False, "report": passed(operator), "memory": False, **options}
        return opsmith.benchmark(operator, **given)

    return measure


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
