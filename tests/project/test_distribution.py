"""Tests that share an xdist_group share a process: the suite's time for torch.compile rests on that."""

import subprocess
import sys
from pathlib import Path

import pytest

GROUPED = """
import os, pytest

@pytest.mark.xdist_group("shared")
@pytest.mark.parametrize("i", range(6))
def test_grouped(i):
    with open("processes", "a") as file:
        print(os.getpid(), file=file)
"""


@pytest.mark.slow
def test_tests_of_one_group_run_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_grouped.py").write_text(GROUPED)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "6 passed" in done.stdout, done.stdout + done.stderr
    processes = (tmp_path / "processes").read_text().split()
    assert len(processes) == 6
    assert len(set(processes)) == 1, "pytest-xdist no longer groups with this pytest: pin another version"
