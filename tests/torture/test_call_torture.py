"""Random calls of C++ kernels are as right as the reference, and ten thousand calls leave nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import torture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
]

KILOBYTES = 4096
"""Growth of memory that is the allocator's own: a tensor left by each call would be far more."""


def test_1500_random_calls_are_right(folder: Path) -> None:
    found, said = torture("call_torture", "calls", variables={"OPSMITH_CACHE": str(folder)})
    assert (found["wrong"], said) == ([], "")
    assert sum(found["by"].values()) == found["calls"] == 1500
    assert found["by"]["refused"] < 100


def test_10000_calls_leave_nothing(folder: Path) -> None:
    found, said = torture("call_torture", "leaks", variables={"OPSMITH_CACHE": str(folder)})
    assert (found["calls"], said) == (10_000, "")
    assert found["objects"] < 100
    assert found["kilobytes"] < KILOBYTES
