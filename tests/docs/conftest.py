"""Benchmarks in the documentation are short."""

from __future__ import annotations

import pytest
from short_benchmarks import shorten_benchmarks


@pytest.fixture(autouse=True)
def _short_benchmarks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # An example in a docstring shows the rounds of an effort.
    shorten_benchmarks(monkeypatch, efforts=request.module.__name__.rpartition(".")[2] != "test_docstrings")
