"""Surveys that no slow machine ends early."""

from __future__ import annotations

import pytest
from unhurried import lift_limits


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    lift_limits(monkeypatch)
