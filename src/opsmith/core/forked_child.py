"""Ending of a forked child when its parent ends, which may be killed during a call that never returns."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Number of the request `PR_SET_PDEATHSIG` of Linux's `prctl`, from `linux/prctl.h`."""


def end_with_parent(parent: int) -> None:
    """Let the system kill this forked child when the thread that forked it ends; only on Linux.

    Args:
        parent: Process that forked the child.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)
