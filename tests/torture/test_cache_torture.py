"""Sixteen processes at once, and fifty kills at random moments: all end, and nothing wrong is ever found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="it forks")


def torture(mode: str) -> dict[str, Any]:
    program = Path(__file__).with_name("torture.py")
    done = subprocess.run([sys.executable, program, mode], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_of_sixteen_processes_one_builds_each_and_the_others_wait() -> None:
    found = torture("together")
    assert found["statuses"] == [0] * 16
    assert sorted(found["builds"]) == [str(key) for key in range(6)]


@pytest.mark.slow
def test_after_a_kill_at_any_moment_everything_is_right() -> None:
    found = torture("killed")
    assert found["killed"] == 50
    assert found["leftover"] == []
    assert found["entries"] == 6
