"""Benchmarks that take next to no time: no test depends on what they measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from briefly import BRIEF, passed
from short_benchmarks import shorten_benchmarks

import opsmith
from opsmith.benchmarking import Benchmark


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_benchmarks(monkeypatch, efforts=False)


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
