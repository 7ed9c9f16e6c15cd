"""The script `opsmith`, which shows a sign of life and handles Ctrl-C while torch is imported, for seconds.

It is not part of the package `opsmith`, because importing a part imports the package first.
"""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType

LOADING = b"opsmith: loading torch"
"""Shown on a terminal until torch is imported."""


def main() -> None:
    """Run the command line; until the command handles Ctrl-C by itself, Ctrl-C ends it at once."""
    # A shell starts a background job with Ctrl-C ignored; that is kept.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    shown = _on_terminal()
    if shown:
        os.write(2, LOADING)
    gc.disable()  # as `opsmith.core.collector` does, which cannot be imported without torch
    from opsmith.cli import main as run

    gc.freeze()  # modules stay: Python would search them all for garbage, at the end too, for a second
    gc.enable()
    if shown:
        _erase()
    run()


def _on_terminal() -> bool:
    """Return True if stderr is a terminal."""
    try:
        return os.isatty(2)
    except OSError:
        return False


def _erase() -> None:
    os.write(2, b"\r" + b" " * len(LOADING) + b"\r")


def _leave(number: int, frame: FrameType | None) -> None:
    if _on_terminal():
        _erase()
    os.write(2, b"opsmith: interrupted\n")
    os._exit(130)
