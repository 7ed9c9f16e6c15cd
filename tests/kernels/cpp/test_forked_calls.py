"""A child that is forked during calls in other threads, as a worker of a DataLoader, can call the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opsmith.build.toolchain import find_toolchain
from opsmith.kernels.cpp.compiler import HEADER
from opsmith.kernels.runtime.library import RUNTIME

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux")

PROGRAM = Path(__file__).with_name("forked_calls.cpp")
FLAGS = ("-std=c++17", "-O1", "-pthread", "-no-pie", "-Wl,--unresolved-symbols=ignore-all")
FORKS = 20


@pytest.mark.slow
def test_a_child_does_not_wait_for_a_thread_that_reads_plans(tmp_path: Path) -> None:
    program = tmp_path / "forked_calls"
    folders = [f"-I{each.parent}" for each in (HEADER, RUNTIME)]
    command = [*find_toolchain().command, *FLAGS, *folders, str(PROGRAM), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program, str(FORKS)], capture_output=True, text=True, check=False)
    assert int(done.stdout) == FORKS
