"""Watchdog: a call that never returns is stopped, and is a finding like any other.

A check beats before and after each call. Where no beat comes for long, a thread looks at the stacks: if a
call of the operator, or a backward, is running, it raises `EndlessCallError` in it. Python raises that at the
next line of Python code, or where the main thread waits, so that a call which hangs in compiled code is
stopped only with its process (`isolate`).
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
"""Seconds that a call may take before any has returned: kernels are built in it."""

LATER_S = 10.0
"""Seconds that a later call may take, unless earlier ones took long."""

FACTOR = 20.0
"""Times that a call may take as long as the longest before it."""

POLL_S = 0.25
"""Seconds between two looks at the time."""

LONGEST_POLLS = 2
"""Most times as long as asked that the time between two looks counts."""

STOP_S = 0.02
"""Seconds between two looks for a thread in which a call can be stopped."""

AGAIN_S = 1.0
"""Seconds between two attempts to stop a thread, which may be handling the first one."""

PATIENCE_S = 4.0
"""Seconds after which a call in a child process, if it could not be stopped, is left to the parent."""

INTERRUPT = getattr(signal, "SIGVTALRM", signal.SIGINT)
"""Signal that interrupts a main thread which waits, as for a lock."""

RECURSION_S = 0.5
"""Seconds after which a recursion is looked for."""

DEEP = 300
"""Number of calls of one function inside of each other that is an endless recursion."""

BUILDING = ("subprocess.py", "cpp_extension.py", "/triton/", "/_dynamo/", "/_inductor/", "/numba/")
"""Parts of files whose code builds something, or waits for another process: neither is a hang."""

_TORCH = Path(torch.__file__).parent
_BACKWARD = {str(_TORCH / "autograd" / name) for name in ("__init__.py", "graph.py", "function.py")}


class EndlessCallError(BaseException):
    """Raised in a call that does not return; no `Exception`, so that no handler takes it for an answer.

    Attributes:
        strained: True if the arguments hold numbers that nobody plausibly passes.
        when: Description of those numbers, for messages.
    """

    strained = False
    when = ""


class OutOfTimeError(BaseException):
    """Raised where a call would begin after the seconds of a property; no handler takes it for an answer."""


def forget_calls() -> None:
    """Forget how long calls took: another operator is checked."""
    _pulse.longest = 0.0


@dataclass
class Pulse:
    """Time of the last beat.

    Args:
        at: When it came.
        longest: Longest time between two beats around a call; 0 while none has returned.
        end: Time after which no further call begins in a thread.
        thread: That thread.
    """

    at: float = 0.0
    longest: float = 0.0
    end: float = math.inf
    thread: int = 0

    def limit(self) -> float:
        """Seconds that a call may take now."""
        return max(LATER_S, FACTOR * self.longest) if self.longest else FIRST_S


_pulse = Pulse()


def beat(*, returned: bool = False) -> None:
    """Record that the check goes on.

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
    """Return a region after whose seconds no further call begins in this thread: what is slow has an end.

    Args:
        seconds: The limit, which does not stop a call; infinity where another one may be over.
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
        calls: Codes of the functions of the check that call the operator.
        give_up: Called where a call cannot be stopped, with the seconds that it has taken.
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
                    self._active = False  # nothing is sent any more
                self._ended.set()
            except EndlessCallError:  # one that was still on its way
                continue
        if self._handles:
            signal.signal(INTERRUPT, signal.SIG_DFL)

    def words(self) -> str:
        """Describe the call that did not return, for a message."""
        return f"`{self.recursion}` calls itself without end" if self.recursion else "a call does not return"

    def _run(self) -> None:
        began, poll, since = 0.0, POLL_S, 0.0
        beaten, before = _pulse.at, time.monotonic()
        while not self._ended.wait(poll):
            now = time.monotonic()
            # Time in which the system ran other processes, or slept, is no time of the call.
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
        """Codes that run in the watched thread, and in those that were started since, innermost first."""
        left_out = self._others | _watching_threads()
        frames = sys._current_frames()
        stacks = {at: [*_stack(top)] for at, top in frames.items() if at not in left_out}
        frames.clear()  # a frame that outlives its call would keep its tensors alive
        return stacks

    def _stop(self, now: float) -> None:
        """Raise in threads that run Python, not in those that wait for a backward inside of theirs."""
        left_out, before = self._others | _watching_threads(), sys.getswitchinterval()
        with self._lock:
            # No other thread gets the interpreter meanwhile: a recursion goes on in another thread soon.
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
"""Seconds for which a thread that has watched waits for the next region, and then ends."""


class _WatchingThread(threading.Thread):
    """A thread that watches one region after another: a check has dozens, and starting one takes long."""

    def __init__(self) -> None:
        super().__init__(name="opsmith watchdog", daemon=True)
        self.regions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.process = os.getpid()

    def run(self) -> None:
        """Watch regions until none has come for a while."""
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
"""Threads that wait for a region; a list's methods need no lock, which a child process might find locked."""


def _watching_threads() -> set[int | None]:
    return {each.ident for each in threading.enumerate() if isinstance(each, _WatchingThread)}


def _run_beside(watch: Callable[[], None]) -> None:
    """Run a function in a thread that waits for one, or else in a new one."""
    while True:
        try:
            thread = _idle.pop()
        except IndexError:
            thread = _WatchingThread()
            thread.start()
        if thread.process == os.getpid():  # a child process has the list of its parent, and no threads
            thread.regions.put(watch)
            return


def _handle() -> bool:
    """Handle `INTERRUPT` in the main thread, unless somebody else does; True if it is ours to send."""
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
    """Name of the function of the operator that runs inside of itself without end; empty if none does."""
    own = (each for each in codes if not Path(each.co_filename).is_relative_to(_TORCH))
    deep = (code.co_qualname for code, count in Counter(own).most_common(1) if count >= DEEP)
    return next(deep, "")


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an exception at the next line of Python that a thread runs.

    None in its place would take one back, and leave Python 3.11 looking for one for ever: each line gets
    slower, and code under `sys.setprofile` hangs.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
