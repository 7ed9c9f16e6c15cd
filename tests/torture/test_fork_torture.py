"""Children that are forked while threads hold locks declare, build and call as if they were alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import torture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
]


def test_150_children_of_busy_threads_are_right(folder: Path) -> None:
    found, said = torture("fork_torture", variables={"OPSMITH_CACHE": str(folder)})
    assert (found["errors"], said) == ([], "")
    assert found["right"] == found["forks"] == 150
    assert all(found["rounds"][each] > 0 for each in ("build", "replace", "plan", "declare"))
