"""Run a property in a forked child process; a kernel that kills it, or never returns, is a finding.

The child is forked, so that it has the parent's operator. It runs with one thread, since the threads of
OpenMP do not survive a fork. Before each sample, it writes the sample's name into shared memory. Its standard
error goes to a file, in which Python's fault handler writes the line of a crash.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import mmap
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import torch

from opsmith import errors
from opsmith.checking.processes.child import (
    Child,
    backward_refusal,
    describe_exit,
    packed,
    refuse_fork,
)
from opsmith.checking.processes.watchdog import POLL_S, beat
from opsmith.checking.report import Failure, Outcome
from opsmith.core.kernels import Kernel
from opsmith.core.location import parsed
from opsmith.kernels.cpp.crash_trace import BEGINNING, location_in, trace, traced_sources, tracer

LIMIT_S = 300.0
"""Default time limit of a property in a child process."""

GRACE_S = 0.2
"""Time between the signal and the kill, for the fault handler to write the stack."""

ROOM = 4096
"""Number of bytes for a sample's name with its length, and for the seconds of a call that hangs."""

HUNG = ROOM - 1
"""Position of the seconds of a call that hangs."""

LAST_LINES = 5
"""Number of lines of the child's output in the evidence."""

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)')
_room: mmap.mmap | None = None
_announced: Callable[[], str] | None = None


def announce(sample: Callable[[], str]) -> None:
    """Record the name of the next sample, which the parent reports after a crash.

    Args:
        sample: Returns the name of the sample; called only in a child process.
    """
    global _announced
    _announced = sample
    beat()
    if _room is None:
        return
    text = sample().encode()[: ROOM - 5]
    _room[: len(text) + 4] = len(text).to_bytes(4, "little") + text


def announced() -> str:
    """Return the name of the sample that ran last in this process; empty if none did."""
    return "" if _announced is None else _announced()


def report_hang(seconds: float) -> None:
    """Report to the waiting parent that a call does not return and cannot be stopped.

    Args:
        seconds: Seconds that the call has taken, at most 255.
    """
    assert _room is not None
    _room[HUNG] = min(int(seconds), 255)


def in_child() -> bool:
    """Return True if this is a child process of an isolated check."""
    return _room is not None


def limit_of(isolate: bool | float) -> float:
    """Return the time limit in seconds of each property in a child process; 0 for no child process.

    Args:
        isolate: As for `check`.

    Raises:
        UsageError: If `isolate` is neither a bool nor a time, or if no process can be forked.
    """
    if isolate is False:
        return 0.0
    given: Any = isolate
    if not (given is True or (isinstance(given, int | float) and 0 < given < float("inf"))):
        raise errors.UsageError(
            "`isolate` must be a bool or a time limit",
            argument="isolate",
            expected="True, False, or the maximum number of seconds of each property",
            got=repr(isolate),
            hint="call `check(operator, isolate=True)`, or `isolate=60`",
        )
    refuse_isolation()
    return LIMIT_S if isolate is True else float(isolate)


def refuse_isolation() -> None:
    """Raise an error like `refuse_fork`, with hints for `isolate`."""
    hint = (
        "leave `isolate` out; a fault in a CUDA kernel is an exception, and does not end the "
        "process. For CPU kernels, check in a process that does not use CUDA"
    )
    refuse_fork("a check cannot be isolated", "isolate", hint)


def run_isolated(
    name: str,
    run: Callable[[], Outcome],
    *,
    where: str,
    limit_s: float = LIMIT_S,
    processor_limit_s: float = math.inf,
    kernels: Sequence[Kernel] = (),
    positions: Iterable[int] = (),
) -> Outcome:
    """Run a property in a child process; a crash or a timeout is a failure.

    Args:
        name: Name of the property.
        run: Function that runs it. Its exceptions are raised here.
        where: Location `file:line` of the operator, for crashes without a known line.
        limit_s: Time limit in seconds.
        processor_limit_s: Limit of the child's processor time in seconds.
        kernels: Kernels that it may run; a crash in a kernel in C++ is reported with its line.
        positions: Positions of all kernels that it may run; after a crash, it counts as the reason why they
            did not run.

    Raises:
        UsageError: As for `refuse_isolation`; also if the system cannot fork, or if autograd has started
            threads of its own.
    """
    refuse_isolation()
    crash_tracer = tracer() if traced_sources(kernels) else None
    room = mmap.mmap(-1, ROOM)
    start = time.perf_counter()
    with tempfile.TemporaryFile() as stderr_file:

        def work(connection: Connection) -> None:
            with suppress(OSError):
                connection.send_bytes(_answer(run, room, stderr_file, crash_tracer))

        child = Child.fork(work, "isolate")
        try:
            answer = _read(child, start + limit_s, room, processor_limit_s)
            if answer is None:
                os.kill(child.process, signal.SIGUSR1)
                time.sleep(GRACE_S)
        finally:
            child.end()
        stderr_file.seek(0)
        words = stderr_file.read().decode(errors="replace")
    if answer:
        sys.stderr.write(words)
        outcome, error = pickle.loads(answer)
        if error is not None:
            raise error
        assert isinstance(outcome, Outcome)
        return outcome
    seconds = time.perf_counter() - start
    sample = bytes(room[4 : 4 + int.from_bytes(room[:4], "little")]).decode(errors="replace")
    limit = f"{float(room[HUNG]) or limit_s:g} s"
    if not room[HUNG] and seconds < limit_s:
        limit = f"{processor_limit_s:g} s of processor time"
    late = limit if answer is None else None
    failure = _death(name, child.status, late, sample, words, where, kernels)
    return Outcome(name, "failed", seconds=seconds, failures=(failure,), kernels=tuple(positions))


def _answer(
    run: Callable[[], Outcome], room: mmap.mmap, stderr_file: BinaryIO, crash_tracer: Path | None
) -> bytes:
    """Run the child; pickle the outcome or the exception."""
    # The parent's garbage is not collected: its destructors may wait for a thread that a child does not have,
    # like torch's process groups.
    gc.freeze()
    try:
        _settle(room, stderr_file)
        fresh = "check in a fresh process, as `opsmith check FILE --isolate` does"
        refusal = backward_refusal("isolate", fresh)
        if refusal is not None:
            return packed(error=refusal)
        if crash_tracer is not None:
            trace(crash_tracer, stderr_file.fileno())
        return packed(run())
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        error.add_note("".join(traceback.format_exception(error)).rstrip())
        return packed(error=error)
    finally:
        sys.stderr.flush()


def _settle(room: mmap.mmap, stderr_file: BinaryIO) -> None:
    """Give the child its own process group, streams, handlers and a single thread."""
    global _room
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(stderr_file.fileno(), 2)
    # The parent's streams may hold locks of threads that no longer exist.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    faulthandler.enable(stderr_file)
    # Not `dump_traceback_later`, which would wait for a timer thread of the parent.
    faulthandler.register(signal.SIGUSR1, stderr_file)
    torch.set_num_threads(1)
    _room = room


def _read(child: Child, end: float, room: mmap.mmap, processor_limit_s: float) -> bytes | None:
    """The child's answer; empty if it dies, None after the time limit or a reported hang."""
    while True:
        left = end - time.perf_counter()
        if left <= 0 or room[HUNG] or _processor_seconds(child.process) > processor_limit_s:
            return None
        if child.connection.poll(min(left, POLL_S)):
            try:
                return child.connection.recv_bytes()
            except (EOFError, ConnectionError):
                return b""


def _processor_seconds(process: int) -> float:
    """Return the processor time of a process in seconds; 0 if the system does not report it."""
    try:
        return time.clock_gettime(
            ~process << 3 | 2
        )  # CPUCLOCK_SCHED of a process, as from clock_getcpuclockid
    except (AttributeError, OSError):
        return 0.0


def _death(
    name: str,
    status: int,
    limit: str | None,
    sample: str,
    words: str,
    where: str,
    kernels: Sequence[Kernel],
) -> Failure:
    """Make the failure for a child that returned no answer."""
    evidence: dict[str, Any] = {"sample": sample} if sample else {}
    if limit is not None:
        how = f"the property did not finish within {limit}"
        evidence["limit"] = limit
    else:
        how, exit_evidence = describe_exit(status)
        evidence.update(exit_evidence)
    own = [line for line in words.splitlines() if line.strip() and not line.startswith(_HANDLER)]
    if own:
        evidence["stderr"] = "\n".join(own[-LAST_LINES:])
    in_cpp = location_in(words, traced_sources(kernels))
    if in_cpp is not None and in_cpp[1]:
        evidence["line"] = in_cpp[1]
    on = f", on {sample}" if sample else ", before any sample ran"
    return Failure(
        name, None, "raises", f"{how}{on}", in_cpp[0] if in_cpp else _running_line(words, where), evidence
    )


_HANDLER = (
    BEGINNING,
    "Fatal Python error",
    "Current thread",
    "Thread 0x",
    "Stack (",
    "  File ",
    "  <truncated",
    "  Binary file",
    "Extension modules",
)
"""First words of the lines of the fault handlers of Python and of opsmith's C++ tracer."""


def _running_line(words: str, where: str) -> str:
    """Return the line in the operator's own file that was running."""
    file, _ = parsed(where) or ("", 0)
    frames = [found for line in words.splitlines() if (found := _FRAME.match(line))]
    own = [found for found in frames if found["file"] == file]
    return f"{file}:{own[0]['line']}" if own else where
