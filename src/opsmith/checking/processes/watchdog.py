"""Watchdog: stop a call that never returns, so that it becomes a finding.

A check records a beat before and after each call. If no beat comes for a long time, a thread looks at the
stacks: if a call of the operator or a backward is running, it raises `EndlessCallError` in it. Python raises
this error at the next line of Python code, or while the main thread waits. A call that hangs in compiled code
can only be stopped with its process (`isolate`).
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import CodeType, FrameType
from typing import Self

import torch

FIRST_S = 20.0
"""Seconds that the first call may take, in which kernels are built."""

LATER_S = 10.0
"""Seconds that a later call may take, unless earlier calls took long."""

FACTOR = 20.0
"""Maximum time of a call, as a multiple of the longest earlier call's time."""

POLL_S = 0.25
"""Seconds between two looks at the time."""

LONGEST_POLLS = 2
"""Maximum counted time between two looks, as a multiple of `POLL_S`."""

STOP_S = 0.02
"""Seconds between two looks for a thread in which a call can be stopped."""

AGAIN_S = 1.0
"""Seconds between two attempts to stop a thread, which may still handle the first."""

PATIENCE_S = 4.0
"""Seconds after which the parent must end a child process whose call could not be stopped."""

INTERRUPT = getattr(signal, "SIGVTALRM", signal.SIGINT)
"""Signal that interrupts a main thread that waits, for example for a lock."""

RECURSION_S = 0.5
"""Seconds after which the watchdog looks for an endless recursion."""

DEEP = 300
"""Number of nested calls of one function that counts as an endless recursion."""

BUILDING = ("subprocess.py", "cpp_extension.py", "/triton/", "/_dynamo/", "/_inductor/", "/numba/")
"""Parts of the names of files whose code builds or waits for another process, which is no hang."""

_TORCH = Path(torch.__file__).parent
_BACKWARD = {str(_TORCH / "autograd" / name) for name in ("__init__.py", "graph.py", "function.py")}


class EndlessCallError(BaseException):
    """Raised in a call that does not return; not an `Exception`, so that no handler catches it.

    Attributes:
        strained: True if the arguments contain numbers that nobody is likely to pass.
        when: Description of those numbers, for messages.
    """

    strained = False
    when = ""


class OutOfTimeError(BaseException):
    """Raised if a call would begin after the seconds of a property; not an `Exception`."""


def forget_calls() -> None:
    """Forget the durations of calls, before a different operator is checked."""
    _pulse.longest = 0.0


@dataclass
class Pulse:
    """Time of the last beat.

    Args:
        at: Time of the last beat.
        longest: Longest time between two beats around a call; 0 before a call has returned.
        end: Time after which no further call begins in a thread.
        thread: The thread in which no further call begins.
    """

    at: float = 0.0
    longest: float = 0.0
    end: float = math.inf
    thread: int = 0

    def limit(self) -> float:
        """Seconds that the current call may take."""
        return max(LATER_S, FACTOR * self.longest) if self.longest else FIRST_S


_pulse = Pulse()


def beat(*, returned: bool = False) -> None:
    """Record that the check makes progress.

    Args:
        returned: True if a call of the operator has returned.
    """
    now = time.monotonic()
    if returned:
        _pulse.longest = max(_pulse.longest, now - _pulse.at)
    _pulse.at = now


def begin_call() -> None:
    """Record that a call of the operator begins.

    Raises:
        OutOfTimeError: If the region of `time_limit` is over.
    """
    beat()
    if _pulse.at > _pulse.end and threading.get_ident() == _pulse.thread:
        raise OutOfTimeError


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Return a region in which, after some seconds, no further call begins in this thread.

    Args:
        seconds: The limit, which does not stop a running call; infinity to ignore an outer limit.
    """
    before = _pulse.end, _pulse.thread
    _pulse.end, _pulse.thread = time.monotonic() + seconds, threading.get_ident()
    try:
        yield
    finally:
        _pulse.end, _pulse.thread = before


class Watchdog:
    """A region in which a call that does not return is stopped.

    Args:
        calls: Code objects of the check's functions that call the operator.
        give_up: Called with the seconds that a call has taken if it cannot be stopped.
    """

    def __init__(self, calls: Iterable[CodeType], give_up: Callable[[float], None] | None = None) -> None:
        self._calls = frozenset(calls)
        self._give_up = give_up
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._active = False
        self._tried: dict[int, float] = {}
        self.seconds = 0.0
        self.recursion = ""

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._others = frozenset(sys._current_frames()) - {self._watched}
        self._active = True
        self._handles = threading.current_thread() is threading.main_thread() and _handle()
        self._interrupts = self._handles
        beat()
        _run_beside(self._run)
        return self

    def __exit__(self, *error: object) -> None:
        while not self._ended.is_set():
            try:
                with self._lock:
                    self._active = False  # no signal is sent any more
                self._ended.set()
            except EndlessCallError:  # a signal that was still on its way
                continue
        if self._handles:
            signal.signal(INTERRUPT, signal.SIG_DFL)

    def words(self) -> str:
        """Describe, for a message, the call that did not return."""
        return f"`{self.recursion}` calls itself without end" if self.recursion else "a call does not return"

    def _run(self) -> None:
        began, poll, since = 0.0, POLL_S, 0.0
        beaten, before = _pulse.at, time.monotonic()
        while not self._ended.wait(poll):
            now = time.monotonic()
            # Time in which the system ran other processes, or slept, does not count as the call's.
            since = since + min(now - before, LONGEST_POLLS * poll) if beaten == _pulse.at else 0.0
            beaten, before = _pulse.at, now
            if since < min(RECURSION_S, _pulse.limit()):
                began, poll = 0.0, POLL_S
                continue
            stacks = self._stacks()
            every = [code for codes in stacks.values() for code in codes]
            is_building = any(part in code.co_filename for code in every for part in BUILDING)
            is_calling = any(each in self._calls or each.co_filename in _BACKWARD for each in every)
            if is_building or not is_calling:
                beat()
                continue
            self.recursion = self.recursion or recursion(every)
            if since < _pulse.limit() and not self.recursion:
                continue
            began, self.seconds, poll = began or now, self.seconds or since, STOP_S
            self._stop(now)
            if self._interrupts and now - began > AGAIN_S:
                signal.pthread_kill(self._watched, INTERRUPT)
                self._interrupts = False
            if self._give_up is not None and now - began > PATIENCE_S:
                self._give_up(self.seconds)
                return

    def _stacks(self) -> dict[int, list[CodeType]]:
        """Code objects that run in the watched thread and in threads started later, the innermost first."""
        left_out = self._others | _watching_threads()
        frames = sys._current_frames()
        stacks = {at: [*_stack(top)] for at, top in frames.items() if at not in left_out}
        frames.clear()  # a frame that outlives its call would keep its tensors alive
        return stacks

    def _stop(self, now: float) -> None:
        """Raise in threads that run Python, but not in threads that wait for a backward in another."""
        left_out, before = self._others | _watching_threads(), sys.getswitchinterval()
        with self._lock:
            # No other thread runs Python meanwhile, since a recursion soon goes on in a different thread.
            sys.setswitchinterval(PATIENCE_S)
            try:
                for at, top in sys._current_frames().items() if self._active else ():
                    waits = at in left_out or top.f_code.co_filename in _BACKWARD
                    if not waits and now - self._tried.get(at, 0.0) > AGAIN_S:
                        self._tried[at] = now
                        _raise_in(at, EndlessCallError)
            finally:
                sys.setswitchinterval(before)


IDLE_S = 1.0
"""Seconds for which a watching thread waits for the next region before it ends."""


class _WatchingThread(threading.Thread):
    """A thread that watches regions one after another, since starting a thread for each takes long."""

    def __init__(self) -> None:
        super().__init__(name="opsmith watchdog", daemon=True)
        self.regions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.process = os.getpid()

    def run(self) -> None:
        """Watch regions until no region has come for a while."""
        while True:
            try:
                watch = self.regions.get(timeout=IDLE_S)
            except Empty:
                try:
                    _idle.remove(self)
                except ValueError:  # a region has just taken it
                    continue
                return
            watch()
            del watch
            _idle.append(self)


_idle: list[_WatchingThread] = []
"""Threads that wait for a region, without a lock, since a child process might inherit it locked."""


def _watching_threads() -> set[int | None]:
    return {each.ident for each in threading.enumerate() if isinstance(each, _WatchingThread)}


def _run_beside(watch: Callable[[], None]) -> None:
    """Run a function in a waiting thread, or else in a new thread."""
    while True:
        try:
            thread = _idle.pop()
        except IndexError:
            thread = _WatchingThread()
            thread.start()
        if thread.process == os.getpid():  # a child process has its parent's list, but no threads
            thread.regions.put(watch)
            return


def _handle() -> bool:
    """Handle `INTERRUPT` in the main thread, unless the user has a handler; True if it may be sent."""
    free = hasattr(signal, "pthread_kill") and signal.getsignal(INTERRUPT) is signal.SIG_DFL
    if free:
        signal.signal(INTERRUPT, _interrupt)
    return free


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise EndlessCallError


def _stack(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def recursion(codes: Sequence[CodeType]) -> str:
    """Name of the operator's function that calls itself endlessly; empty if there is none."""
    own = (each for each in codes if not Path(each.co_filename).is_relative_to(_TORCH))
    deep = (code.co_qualname for code, count in Counter(own).most_common(1) if count >= DEEP)
    return next(deep, "")


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an exception at the next line of Python that a thread runs.

    Passing None would withdraw an exception, but make Python 3.11 look for it for ever: each line gets
    slower, and code under `sys.setprofile` hangs.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
