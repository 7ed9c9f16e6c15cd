"""After an interrupt at any moment of a build, a load, a call or a replacement, the same call is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import torture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
]


def test_after_an_interrupt_at_any_moment_the_same_call_is_right(folder: Path) -> None:
    found, _ = torture("interruption_torture", variables={"OPSMITH_CACHE": str(folder)})
    for kind in ("build", "load"):
        assert found[kind]["wrong"] == found[kind]["wrong after"] == found[kind]["left"] == 0
        assert found[kind]["interrupted"] > 20
    assert found["same process"]["wrong"] == 0
    assert found["same process"]["interrupted"] > 200
