"""A forked child process, and the pipe between it and its parent."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from opsmith import errors
from opsmith.checking.report import Outcome, Report, plain
from opsmith.core.forked_child import end_with_parent

SIGNALS = {
    "SIGSEGV": "a segmentation fault: it used memory outside of its own memory",
    "SIGBUS": "a bus error: it used an address without memory, or an address that is not aligned",
    "SIGABRT": "an abort: C++ found an uncaught exception, or a damaged heap",
    "SIGFPE": "an arithmetic error, such as the division of an integer by zero",
    "SIGILL": "an instruction that this processor does not have",
    "SIGKILL": "another process killed it, perhaps the system, because memory ran out",
}


@dataclass
class Child:
    """A forked process.

    Args:
        process: Its process id; 0 after it has ended.
        connection: The parent's end of the pipe.
        status: Its exit status, after it has ended.
    """

    process: int
    connection: Connection
    status: int = 0

    @classmethod
    def fork(cls, run: Callable[[Connection], None], argument: str) -> Child:
        """Fork a copy of this process, which ends without running this process's handlers or flushing
        buffers.

        Args:
            run: Function to run in the child, with the child's end of the pipe.
            argument: The user's argument that requests a child.

        Raises:
            UsageError: If the system cannot fork.
        """
        ours, theirs = Pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: threads and fork
            try:
                process = os.fork()
            except OSError as error:
                ours.close()
                theirs.close()
                raise errors.UsageError(
                    f"the system cannot fork a process: {error.strerror}",
                    argument=argument,
                    hint=f"leave `{argument}` out, or check on a machine with enough memory and processes",
                ) from error
        if process == 0:
            try:
                ours.close()
                end_with_parent(parent)
                run(theirs)
            finally:
                os._exit(0)
        theirs.close()
        return cls(process, ours)

    def has_ended(self) -> bool:
        """Return True if it has ended by itself."""
        if self.process:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                self.process, self.status = 0, status
        return not self.process

    def end(self) -> None:
        """End it, with the processes that it has started, unless it has ended."""
        self.connection.close()
        if self.process:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)  # in case it has no group of its own yet
            _, self.status = os.waitpid(self.process, 0)
            self.process = 0


def refuse_fork(problem: str, argument: str, hint: str) -> None:
    """Raise an error if no process can be forked, or if a forked process could not compute.

    Args:
        problem: The error in a sentence.
        argument: The user's argument that requests a child.
        hint: What to do instead.

    Raises:
        UsageError: On a system without fork, or after an accelerator has been used.
    """
    why = None if hasattr(os, "fork") else f"the platform is {sys.platform}, where processes cannot be forked"
    if why is None and torch.cuda.is_initialized():
        why = "CUDA has been used, and a forked process cannot use it again"
    if why is not None:
        raise errors.UsageError(f"{problem}: {why}", argument=argument, hint=hint)


def describe_exit(status: int) -> tuple[str, dict[str, Any]]:
    """Describe the exit of a process that ran a kernel; the signal or the status is evidence."""
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        return f"the operator ends the process with status {code}, instead of returning", {"status": code}
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"the process dies of {name} ({SIGNALS.get(name) or signal.strsignal(number)})", {"signal": name}


def backward_refusal(argument: str, hint: str) -> errors.UsageError | None:
    """Return the error for a child in which torch refuses every backward, whatever the operator is.

    Args:
        argument: The argument that requests a child.
        hint: What to do instead.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, device="cpu", requires_grad=True)
        try:
            leaf.clone().backward()
        except RuntimeError as error:
            if "fork" in str(error):
                return errors.UsageError(
                    "a check cannot be isolated after autograd has started its own threads: torch "
                    "computes no gradients in a process that is forked later",
                    argument=argument,
                    got=str(error).partition(". ")[0],
                    hint=f"{hint}. A backward on an accelerator, or a backward inside of 60 other "
                    "backwards, starts these threads. If torch is built for CUDA and finds no GPU, "
                    "`torch.compile` may start them before the first gradient",
                )
            raise
    return None


def packed(answer: Outcome | Report | None = None, error: BaseException | None = None) -> bytes:
    """Pickle a child's findings and exception in a form that every process can unpickle.

    Evidence may be any object, which becomes JSON; exceptions that cannot be unpickled become text.
    """
    try:
        found = pickle.dumps((answer, error))
        pickle.loads(found)
        return found
    except Exception:
        return pickle.dumps((_sendable(answer), None if error is None else _as_text(error)))


def _as_text(error: BaseException) -> RuntimeError:
    """Return an exception that every process can unpickle, with the message of a given exception."""
    plain_error = RuntimeError(f"{type(error).__name__}: {errors.message_of(error)}")
    plain_error.__notes__ = getattr(error, "__notes__", [])
    return plain_error


def _sendable(answer: Outcome | Report | None) -> Any:
    """Return an outcome or a report with the JSON form of its evidence."""
    if answer is None:
        return None
    if isinstance(answer, Report):
        return replace(answer, outcomes=tuple(map(_sendable, answer.outcomes)))
    failures = tuple(replace(each, evidence=plain(each.evidence)) for each in answer.failures)
    return replace(answer, failures=failures)
