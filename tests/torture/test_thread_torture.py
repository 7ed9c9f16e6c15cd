"""Threads call an operator while another replaces its kernel; each call returns what was in force then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import opsmith

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
]

PROGRAM = Path(__file__).with_name("thread_torture.py")
RELOADS = 500
LIMIT_S = 900


@pytest.mark.parametrize("texts", [1, 2, 5])
@pytest.mark.parametrize("mode", ["reloaded", "declared", "redeclared"])
def test_calls_of_four_threads_are_right_while_another_replaces_the_kernel(mode: str, texts: int) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), mode, str(RELOADS), str(texts)],
        env={**os.environ, "PYTHONPATH": str(Path(opsmith.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found.pop("calls") > RELOADS
    assert found == {"reloads": RELOADS, "errors": {}}
