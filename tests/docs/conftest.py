"""Benchmarks in the documentation are short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from short_benchmarks import shorten_benchmarks


@pytest.fixture(autouse=True)
def _short_benchmarks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # An example in a docstring shows the rounds of an effort.
    shorten_benchmarks(monkeypatch, efforts=request.module.__name__.rpartition(".")[2] != "test_docstrings")


@pytest.fixture(autouse=True)
def _algorithms_as_before() -> Iterator[None]:
    """An example shows what is refused where torch must be deterministic; other files' tests follow it."""
    yield
    torch.use_deterministic_algorithms(False)
