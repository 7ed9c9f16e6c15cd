"""A property in a child process: a kernel that kills the process, or never returns, is a finding.

The child is forked, so that it has the operator as the parent has it. It runs with one thread, since the
threads of OpenMP do not outlive a fork. Before it runs on a sample it writes the sample's name into memory
that both share. Its standard error goes to a file, where Python's fault handler says in which line it died.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import re
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from opsmith import errors
from opsmith.build.cpp.source import CppSource
from opsmith.build.cpp.tracing import BEGINNING, place_in, trace, tracer
from opsmith.checking.report import Failure, Outcome, plain

LIMIT_S = 300.0
"""How long a property may take in a child process, unless the caller says otherwise."""

GRACE_S = 0.2
"""How much later the child is killed, so that it can write down where it is."""

ROOM = 4096
"""Bytes for the name of a sample, its length included."""

LAST_LINES = 5

SIGNALS = {
    "SIGSEGV": "a segmentation fault: it used memory that is not its own",
    "SIGBUS": "a bus error: it used memory that is not there, or not aligned",
    "SIGABRT": "an abort: C++ found an exception that nobody caught, or the heap overwritten",
    "SIGFPE": "an arithmetic error, such as a whole number divided by zero",
    "SIGILL": "an instruction that this processor does not have",
    "SIGKILL": "it was killed from outside, by the system for want of memory perhaps",
}

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)')
_room: mmap.mmap | None = None


def announce(sample: Callable[[], str]) -> None:
    """Say what runs next, if the parent is to know that after a death.

    Args:
        sample: Gives the name of the sample; called in a child process alone.
    """
    if _room is None:
        return
    text = sample().encode()[: ROOM - 4]
    _room[: len(text) + 4] = len(text).to_bytes(4, "little") + text


def in_child() -> bool:
    """Whether this is a child process, in which a property runs."""
    return _room is not None


def limit_of(isolate: bool | float) -> float:
    """Seconds that each property may take in a child process; 0 where there is to be none.

    Args:
        isolate: As of `check`.

    Raises:
        UsageError: If it is neither a truth value nor a time, or no process can be forked.
    """
    if isolate is False:
        return 0.0
    given: Any = isolate
    if not (given is True or (isinstance(given, int | float) and 0 < given < float("inf"))):
        raise errors.UsageError(
            "this says neither whether to isolate a check nor for how long",
            argument="isolate",
            expected="True, False, or how many seconds each property may take",
            got=repr(isolate),
            hint="call `check(operator, isolate=True)`, or `isolate=60`",
        )
    refuse_isolation()
    return LIMIT_S if isolate is True else float(isolate)


def refuse_isolation() -> None:
    """Raise an error where a child process cannot be forked, or could not compute.

    Raises:
        UsageError: On a system without fork, or once an accelerator has been used.
    """
    if not hasattr(os, "fork"):
        raise errors.UsageError(
            "a check can only be isolated where processes can be forked",
            argument="isolate",
            got=f"the platform {sys.platform}",
            hint="leave `isolate` out, or check on Linux or macOS",
        )
    if torch.cuda.is_initialized():
        raise errors.UsageError(
            "a check cannot be isolated once CUDA has been used: a forked process cannot use it again",
            argument="isolate",
            hint="leave `isolate` out; a fault in a CUDA kernel is an exception, and does not end the "
            "process. For the kernels of the CPU, check in a process that does not touch CUDA",
        )


def isolated(
    name: str,
    run: Callable[[], Outcome],
    *,
    where: str,
    limit_s: float = LIMIT_S,
    kernels: Sequence[CppSource] = (),
) -> Outcome:
    """What a property comes to in a child process; its death, or too long a life, is a failure.

    Args:
        name: Name of the property.
        run: Runs it. What it raises is raised here.
        where: `file:line` of the operator, for deaths of which no better place is known.
        limit_s: After so many seconds the child is killed.
        kernels: Those in C++ that it may run: a death in one of them is told with its line.

    Raises:
        UsageError: As `refuse_isolation`, where the system forks none, and once autograd has started threads
            of its own.
    """
    refuse_isolation()
    tells = tracer() if kernels else None
    room = mmap.mmap(-1, ROOM)
    start = time.perf_counter()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later, of threads and fork
            try:
                child = os.fork()
            except OSError as error:
                os.close(reading)
                os.close(writing)
                raise errors.UsageError(
                    f"a check cannot be isolated where the system forks no process: {error.strerror}",
                    argument="isolate",
                    hint="leave `isolate` out, or check where memory and the number of processes suffice",
                ) from error
        if child == 0:
            os.close(reading)
            _run(run, room, said, writing, tells)
        os.close(writing)
        try:
            answer = _read(reading, start + limit_s)
            if answer is None:
                os.kill(child, signal.SIGUSR1)
                time.sleep(GRACE_S)
        finally:
            os.close(reading)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)  # and what it has started itself
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)  # where it does not lead a group yet
            _, status = os.waitpid(child, 0)
        said.seek(0)
        words = said.read().decode(errors="replace")
    if answer:
        sys.stderr.write(words)
        return _received(answer)
    seconds = time.perf_counter() - start
    sample = bytes(room[4 : 4 + int.from_bytes(room[:4], "little")]).decode(errors="replace")
    late = answer is None
    failure = _death(name, status, limit_s if late else None, sample, words, where, kernels)
    return Outcome(name, "failed", seconds=seconds, failures=(failure,))


def _run(
    run: Callable[[], Outcome], room: mmap.mmap, said: BinaryIO, writing: int, tells: Path | None
) -> NoReturn:
    """The life of the child: it ends without the parent's handlers and buffers being run."""
    answer = b""
    try:
        answer = _packed(run, room, said, tells)
    finally:
        with suppress(OSError), os.fdopen(writing, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)


def _packed(run: Callable[[], Outcome], room: mmap.mmap, said: BinaryIO, tells: Path | None) -> bytes:
    """The outcome, or what was raised, as bytes."""
    try:
        _settle(room, said)
        refusal = _without_backward()
        if refusal is not None:
            return pickle.dumps((None, refusal))
        if tells is not None:
            trace(tells, said.fileno())
        outcome = run()
        try:
            return pickle.dumps((outcome, None))
        except Exception:  # evidence may be anything; as the report's JSON has it, it can be sent
            return pickle.dumps((_sendable(outcome), None))
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        error.add_note("".join(traceback.format_exception(error)).rstrip())
        try:
            packed = pickle.dumps((None, error))
            pickle.loads(packed)
        except Exception:  # there are exceptions that cannot be made again from what they keep
            told = RuntimeError(f"{type(error).__name__}: {error}")
            told.__notes__ = error.__notes__
            packed = pickle.dumps((None, told))
        return packed
    finally:
        sys.stderr.flush()


def _sendable(outcome: Outcome) -> Outcome:
    return replace(
        outcome, failures=tuple(replace(each, evidence=plain(each.evidence)) for each in outcome.failures)
    )


def _settle(room: mmap.mmap, said: BinaryIO) -> None:
    """Make the child a process of its own: its group, its streams, its handlers, its one thread."""
    global _room
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(said.fileno(), 2)
    # The parent's streams may hold locks of threads that are not here any more.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    faulthandler.enable(said)
    # Not `dump_traceback_later`: it would wait for the thread of a timer that the parent has set.
    faulthandler.register(signal.SIGUSR1, said)
    torch.set_num_threads(1)
    _room = room


def _without_backward() -> errors.UsageError | None:
    """The error for a child in which torch refuses every backward, which is no fault of the operator."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, device="cpu", requires_grad=True)
        try:
            leaf.clone().backward()
        except RuntimeError as error:
            if "fork" in str(error):
                return errors.UsageError(
                    "a check cannot be isolated once autograd has started threads of its own: torch computes "
                    "no gradients in a process that is forked after that",
                    argument="isolate",
                    got=str(error).partition(". ")[0],
                    hint="check in a fresh process, as `opsmith check FILE --isolate` does. A backward on an "
                    "accelerator starts such threads, and one within 60 others; where torch is built for "
                    "CUDA and finds none, `torch.compile` may, unless a gradient was computed before",
                )
            raise
    return None


def _received(answer: bytes) -> Outcome:
    outcome, error = pickle.loads(answer)
    if error is not None:
        raise error
    assert isinstance(outcome, Outcome)
    return outcome


def _read(reading: int, end: float) -> bytes | None:
    """All that the child writes until it closes the pipe; None if it is too late."""
    parts: list[bytes] = []
    while True:
        left = end - time.perf_counter()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            return None
        part = os.read(reading, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _death(
    name: str,
    status: int,
    limit_s: float | None,
    sample: str,
    words: str,
    where: str,
    kernels: Sequence[CppSource],
) -> Failure:
    """The failure for a child that gave no answer."""
    evidence: dict[str, Any] = {"sample": sample} if sample else {}
    if limit_s is not None:
        how = f"it did not finish within {limit_s:g} s"
        evidence["limit"] = f"{limit_s:g} s"
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        what = SIGNALS.get(known) or signal.strsignal(number)
        how = f"the process dies of {known} ({what})"
        evidence["signal"] = known
    else:
        how = f"it ends the process, with status {os.WEXITSTATUS(status)}, instead of returning"
        evidence["status"] = os.WEXITSTATUS(status)
    own = [line for line in words.splitlines() if line.strip() and not _of_the_handler(line)]
    if own:
        evidence["said"] = "\n".join(own[-LAST_LINES:])
    in_cpp = place_in(words, kernels)
    if in_cpp is not None and in_cpp[1]:
        evidence["line"] = in_cpp[1]
    on = f", on {sample}" if sample else ", before it ran on any sample"
    return Failure(
        name, None, "raises", f"{how}{on}", in_cpp[0] if in_cpp else _place(words, where), evidence
    )


def _of_the_handler(line: str) -> bool:
    """Whether a line is one of Python's fault handler, which tells of nothing but places."""
    return line.startswith(_HANDLER)


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
"""How the lines of the fault handler begin, and of what tells of C++."""


def _place(words: str, where: str) -> str:
    """The line of the operator's own file in which it was."""
    file = where.rpartition(":")[0]
    frames = [found for line in words.splitlines() if (found := _FRAME.match(line))]
    own = [found for found in frames if found["file"] == file]
    return f"{file}:{own[0]['line']}" if own else where
