"""Ends of a command: a message and an exit status for errors, Ctrl-C, `sys.exit` and fatal signals."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import traceback as tracebacks
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import NoReturn, TextIO

import typer

from opsmith import errors
from opsmith.cli.console import PrintableConsole

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130
"""Exit statuses: something failed; the command could not be carried out; Ctrl-C."""


@contextmanager
def guarded(*, traceback: bool = False, failures: tuple[str, ...] = ()) -> Iterator[None]:
    """Context manager that prints errors as messages on stderr.

    Args:
        traceback: Print the traceback of an error, too.
        failures: Names of the errors that concern the subject of the command, and not the way it was called.

    Raises:
        Exit: With status 1 for one of `failures`, 2 for any other error of opsmith or a `sys.exit` of the
            code that runs, 130 for Ctrl-C. Any other exception is a bug of opsmith, and is not caught.
    """
    try:
        with _interruptible():
            yield
    except errors.OpsmithError as error:
        if traceback:
            typer.echo(tracebacks.format_exc(), err=True)
        complain(error)
        raise typer.Exit(FAILED if type(error).__name__ in failures else UNUSABLE) from None
    except SystemExit as error:
        if traceback:
            typer.echo(tracebacks.format_exc(), err=True)
        typer.echo(f"opsmith: {_SYSTEM_EXIT.format(code=error.code)}", err=True)
        raise typer.Exit(UNUSABLE) from None
    except KeyboardInterrupt:
        typer.echo("opsmith: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


_SYSTEM_EXIT = (
    "the code that was run called `sys.exit({code})`, and nothing more can be reported; `--traceback` shows "
    "the line, and `opsmith check --isolate` reports the exit as a finding"
)

_interrupted = False


def raise_interruption() -> None:
    """Raise KeyboardInterrupt again after Ctrl-C: Python ignores it in finalisers, and after a fork."""
    if _interrupted:
        raise KeyboardInterrupt


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in the region, and record that it did."""
    global _interrupted
    _interrupted = False
    handler = signal.getsignal(signal.SIGINT)
    ours = getattr(handler, "__module__", None) == "opsmith_command"
    if not (ours or handler is signal.default_int_handler) or current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _interrupted = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


@contextmanager
def fatal_ends_reported(checked: str = "what was checked") -> Iterator[None]:
    """Report on stderr if the process ends in the region, by a fatal signal or `os._exit`.

    Python's fault handler prints the lines at which a fatal signal arrived.

    Args:
        checked: Name of the subject in the region, for the message.
    """
    stderr = descriptor_of(sys.stderr)
    enabled = faulthandler.is_enabled()
    if stderr is not None and not enabled:
        faulthandler.enable(stderr)
    watcher = _watcher(_ENDED.format(checked=checked), stderr)
    try:
        with exit_reported(checked, watcher):
            yield
    finally:
        _dismiss(watcher)
        if not enabled:
            faulthandler.disable()


@contextmanager
def exit_reported(checked: str, watcher: subprocess.Popen[bytes] | None = None) -> Iterator[None]:
    """Report `os._exit` of this process on stderr; its status 0 becomes 2, since there is no report yet.

    Args:
        checked: Name of the subject in the region, for the message.
        watcher: The process that reports ends of all other kinds.
    """
    leave, own = os._exit, os.getpid()

    def leave_with_message(status: int) -> NoReturn:
        if os.getpid() == own:
            _dismiss(watcher)
            typer.echo(f"opsmith: {_OS_EXIT.format(checked=checked, status=status)}", err=True)
            leave(status or UNUSABLE)
        leave(status)

    os._exit = leave_with_message
    try:
        yield
    finally:
        os._exit = leave


def _watcher(message: str, stderr: int | None) -> subprocess.Popen[bytes] | None:
    """Start a process that prints a message when this process ends, since a killed process cannot."""
    if stderr is None:
        return None
    program = "import sys; sys.stdin.read(); print(sys.argv[1], file=sys.stderr)"
    command = [sys.executable, "-ISc", program, f"opsmith: {message}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, start_new_session=True)


def _dismiss(watcher: subprocess.Popen[bytes] | None) -> None:
    if watcher is not None:
        watcher.kill()
        watcher.communicate()


_ENDED = (
    "the process ended while {checked} ran, and nothing more is reported; if a kernel in C++ writes out of "
    "bounds, `--sanitize` names the line; with `--isolate` this crash is a finding, and the check goes on"
)

_OS_EXIT = (
    "{checked} called `os._exit({status})`, and nothing more is reported; with `--isolate` this "
    "exit is a finding, and the check goes on"
)


def descriptor_of(stream: TextIO) -> int | None:
    """Return the file descriptor of a standard stream; None if it is closed or has none, as in a test."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


@contextmanager
def waiting(activity: str) -> Iterator[None]:
    """Show an activity that may take over a second, if stderr is a terminal."""
    console = PrintableConsole(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(activity):
        yield


def complain(error: Exception) -> None:
    """Print an error on stderr."""
    typer.echo(f"opsmith: {error}", err=True)
