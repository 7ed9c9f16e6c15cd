"""A process that dies of what it checks cannot say so itself: another one, which only waits, says it.

Python's fault handler tells the line. What was checked there, and that `--isolate` makes a finding of it, the
other process says; it is forked before anything is checked, and says nothing if all goes well. Nor does
`os._exit(0)` in what is checked end the command as a success.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import NoReturn

from opsmith.cli.guard import UNUSABLE

ROOM = 1024
"""Bytes for what is being checked, its length included."""

Note = Callable[[str], None]


@contextmanager
def watched() -> Iterator[Note]:
    """A region whose death is told on stderr; where no process can be forked, by the fault handler alone.

    Yields:
        What takes down what comes next.
    """
    stderr = _descriptor()
    if stderr is None:
        yield _nothing
        return
    known = faulthandler.is_enabled()
    if not known:
        faulthandler.enable(stderr)
    try:
        with without_success(), _forked(stderr) if hasattr(os, "fork") else nullcontext(_nothing) as note:
            yield note
    finally:
        if not known:
            faulthandler.disable()


def _nothing(text: str) -> None:
    """Nobody is there to take it down."""


@contextmanager
def without_success() -> Iterator[None]:
    """A region in which `os._exit(0)` ends this process with another status: nothing is reported by then."""
    leave, own = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        leave(status or UNUSABLE if os.getpid() == own else status)

    os._exit = end
    try:
        yield
    finally:
        os._exit = leave


def _descriptor() -> int | None:
    """The file that stderr is; None where it is none, as in a test."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None


@contextmanager
def _forked(stderr: int) -> Iterator[Note]:
    room = mmap.mmap(-1, ROOM)
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads and fork: this child runs none
        child = os.fork()
    if child == 0:
        _watch(reading, writing, room, stderr)
    os.close(reading)

    def note(text: str) -> None:
        told = text.encode()[: ROOM - 4]
        room[: len(told) + 4] = len(told).to_bytes(4, "little") + told

    try:
        yield note
    finally:
        if os.getpid() == parent:  # and not a child that what is checked has forked
            with suppress(OSError):
                os.write(writing, b".")
            os.close(writing)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _watch(reading: int, writing: int, room: mmap.mmap, stderr: int) -> NoReturn:
    """The life of the process that waits: it ends with the other one."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other one
        os.close(writing)
        if not os.read(reading, 1):
            what = room[4 : 4 + int.from_bytes(room[:4], "little")].decode(errors="replace")
            os.write(stderr, f"opsmith: {_DIED.format(what=what)}\n".encode())
    finally:
        os._exit(0)


_DIED = (
    "the process ended while it checked {what}, and nothing more is reported; with `--isolate` such a death "
    "is a finding, and the rest is checked"
)
