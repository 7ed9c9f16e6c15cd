"""Benchmarks that take next to no time, for tests of everything but the times themselves."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from opsmith.benchmarking import effort, machine, timing


def shorten_benchmarks(patch: pytest.MonkeyPatch, *, efforts: bool = True) -> None:
    """Measure small ceilings, wait for nothing, and time a few calls in three rounds.

    Args:
        patch: Undoes it.
        efforts: Shorten the rounds of every effort too.
    """
    patch.setattr(machine, "SIDES", {"cpu": 32})
    patch.setattr(machine, "FOOTPRINTS", (1 << 12, 1 << 16))
    patch.setattr(machine, "TURN_S", 1e-5)
    patch.setattr(timing, "PAUSE_S", 1e-5)
    patch.setattr(gc, "collect", lambda generation=2: 0)
    if efforts:
        short = {
            name: replace(level, least=3, most=3, turn_s=1e-5, budget_s=0.01)
            for name, level in effort.EFFORTS.items()
        }
        patch.setattr(effort, "EFFORTS", short)
