"""A check of samples on another device, in a process that has one from its beginning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_samples_on_a_device() -> None:
    tests = HERE / "standin_device" / "samples_on_standin.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent, check=False)
    assert found.returncode == 0, found.stdout[-20_000:]
    assert " passed" in found.stdout
