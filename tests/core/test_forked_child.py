"""A forked child ends when its parent is killed, whatever it is in."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opsmith.core import forked_child

PARENT = """
import os, runpy

end_with_parent = runpy.run_path({module!r})["end_with_parent"]  # without torch
parent = os.getpid()
child = os.fork()
if child == 0:
    end_with_parent({parent})
    print(os.getpid(), flush=True)
    while True:
        pass
os.waitpid(child, 0)
"""


def program(parent: str) -> list[str]:
    return [sys.executable, "-c", PARENT.format(module=forked_child.__file__, parent=parent)]


def has_ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # where nobody waits for orphans


@pytest.mark.skipif(sys.platform != "linux", reason="a request of Linux")
def test_a_child_that_never_returns_ends_with_its_parent() -> None:
    with subprocess.Popen(program("parent"), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        while not has_ended(child):
            time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="a request of Linux")
def test_a_child_whose_parent_has_ended_before_ends_at_once() -> None:
    done = subprocess.run(program("-1"), stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
