"""A child that is forked during a build waits for no thread of its parent, and keeps none of its locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from opsmith.build.cache import Cache
from opsmith.core import forked_locks
from opsmith.core.forked_locks import lock_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no process")


class Holder:
    def __init__(self) -> None:
        self.lock = lock_of(self, "lock")


def in_child(holder: Holder) -> bool:
    """Return True if a forked child gets the lock at once, in another thread than the forking one."""
    child = os.fork()
    if not child:
        free = threading.Event()

        def take() -> None:
            if holder.lock.acquire(blocking=False):
                free.set()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        os._exit(0 if free.is_set() else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_lock_of_another_thread_is_free_in_a_child() -> None:
    holder, held, end = Holder(), threading.Event(), threading.Event()

    def hold() -> None:
        with holder.lock:
            held.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert in_child(holder)
    assert not holder.lock.acquire(blocking=False)  # the parent's own is as it was
    end.set()
    thread.join()


def test_a_lock_is_forgotten_with_its_holder() -> None:
    before = set(forked_locks._locks)
    holder = Holder()
    added = set(forked_locks._locks) - before
    assert added
    del holder
    assert not added & set(forked_locks._locks)


def test_a_lock_of_the_forking_thread_stays_held_in_a_child() -> None:
    holder = Holder()
    with holder.lock:
        assert not in_child(holder)
    assert in_child(holder)


FORKING = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
import opsmith

folder = Path(sys.argv[1])

@opsmith.operator("forking::twice")
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.kernel("cpu", cpp="void twice(Contiguous<const float> x, Contiguous<float> y) {"
    " for (int64_t i = 0; i < x.numel(); ++i) y[i] = 2 * x[i]; }")

x = torch.ones(3)
thread = threading.Thread(target=twice, args=(x,))
thread.start()
while not (folder / "compiling").exists():
    time.sleep(0.01)
child = os.fork()
if not child:
    signal.alarm(300)
    (folder / "go").touch()
    os._exit(0 if twice(x).tolist() == [2, 2, 2] else 1)
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

SLOW_COMPILER = """#!/bin/sh
touch {folder}/compiling
while [ ! -e {folder}/go ]; do sleep 0.05; done
exec g++ "$@"
"""


@pytest.mark.slow
def test_a_child_forked_during_a_build_computes(tmp_path: Path) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text(SLOW_COMPILER.format(folder=tmp_path))
    compiler.chmod(0o700)
    (tmp_path / "script.py").write_text(FORKING)
    environment = {**os.environ, "CXX": str(compiler), "OPSMITH_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


KEEPING = """
import os, sys, time
from pathlib import Path
from opsmith.build.cache import Cache

folder = Path(sys.argv[1])

def build(directory):
    child = os.fork()
    if not child:  # idle, as a worker that waits for data
        (folder / "idle").write_text(str(os.getpid()))
        time.sleep(600)
        os._exit(0)
    while not (folder / "idle").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)

Cache(folder / "cache").obtain({"a": "b"}, build)
"""


@pytest.mark.slow
def test_an_idle_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KEEPING)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py"), str(tmp_path)], check=False)
    idle = int((tmp_path / "idle").read_text())
    try:
        assert done.returncode == -signal.SIGKILL
        entry = Cache(tmp_path / "cache").obtain({"a": "b"}, lambda at: (at / "c").touch())
        assert entry.source == "built"
    finally:
        os.kill(idle, signal.SIGKILL)
