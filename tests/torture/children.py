"""Children that a program of this folder forks: what they answer, and what they leave running."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from opsmith import errors

RIGHT, WRONG, REFUSED, HUNG = 0, 1, 3, -signal.SIGALRM
"""Statuses: right results, anything else, an error of opsmith's, no end."""
NOBODY = 65534
"""User who may do nothing that root may."""
LIMIT_S = 600
"""Limit of a child, far beyond what it needs."""
_ADOPTS_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


def forked(call: Callable[[], None]) -> int:
    """Call in a fork; return its process id. It prints what it raises."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        status = WRONG
        try:
            os.setsid()
            call()
            status = RIGHT
        except errors.OpsmithError as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
            status = REFUSED
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return child


def ended(child: int) -> int:
    """Wait for a child; return its status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def import_modules_of(call: Callable[[], None]) -> None:
    """Import the modules that a call imports: Python's own may be closed to the user that a child becomes."""
    with tempfile.NamedTemporaryFile("w+") as listed:

        def call_and_list() -> None:
            call()
            Path(listed.name).write_text("\n".join(sys.modules))

        assert ended(forked(call_and_list)) == RIGHT
        for name in listed.read().splitlines():
            with suppress(ImportError):  # of a module that was made, not imported
                importlib.import_module(name)


def observed(call: Callable[[], None]) -> tuple[int, str]:
    """Call in a fork that ends as a program does; return its status and what it printed."""
    with tempfile.TemporaryFile() as printed:

        def redirected() -> None:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            warnings.simplefilter("always")
            try:
                call()
            finally:
                atexit._run_exitfuncs()

        status = ended(forked(redirected))
        printed.seek(0)
        return status, printed.read().decode(errors="backslashreplace")


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that `orphans` sees them."""
    ctypes.CDLL(None).prctl(_ADOPTS_ORPHANS, 1, 0, 0, 0)


def orphans() -> list[str]:
    """Wait for all children left, and return the commands of those that do not end, which are killed then."""
    deadline = time.monotonic() + LIMIT_S / 10
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return []
    left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ") for each in left]
    for each in left:
        os.kill(int(each), signal.SIGKILL)
        ended(int(each))
    return commands
