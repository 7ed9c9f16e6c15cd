"""A check of samples on another device, in a process that has one from its beginning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_samples_on_a_device() -> None:
    folder = HERE / "standin_device"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "standin"]
    found = subprocess.run(
        [*command, str(folder / "samples_on_standin.py")],
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert found.returncode == 0, found.stdout[-20_000:]
    assert " passed" in found.stdout
