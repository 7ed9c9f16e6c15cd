"""What every command does with errors: one message, no traceback, and the exit status that belongs to it."""

from __future__ import annotations

import signal
import traceback as tracebacks
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

import typer
from rich.console import Console

from opsmith import errors

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130
"""Exit statuses: something failed; the command could not be carried out; Ctrl-C."""


@contextmanager
def guarded(*, traceback: bool = False) -> Iterator[None]:
    """A region whose errors become messages on stderr.

    Args:
        traceback: Whether to show where an error comes from.

    Raises:
        Exit: With status 2 for an error of opsmith, or where what is run calls `sys.exit`; 130 for Ctrl-C.
            Other exceptions are mistakes in opsmith itself, and pass.
    """
    try:
        with _hearing():
            yield
    except errors.OpsmithError as error:
        if traceback:
            typer.echo(tracebacks.format_exc(), err=True)
        complain(error)
        raise typer.Exit(UNUSABLE) from None
    except SystemExit as error:
        if traceback:
            typer.echo(tracebacks.format_exc(), err=True)
        typer.echo(f"opsmith: {_LEFT.format(code=error.code)}", err=True)
        raise typer.Exit(UNUSABLE) from None
    except KeyboardInterrupt:
        typer.echo("opsmith: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


_LEFT = (
    "what was run called `sys.exit({code})`, and nothing more can be reported; `--traceback` shows where, "
    "and `opsmith check --isolate` makes a finding of it"
)

_heard = False


def raise_interruption() -> None:
    """Raise KeyboardInterrupt once more if Ctrl-C was heard: in a finaliser Python ignores exceptions."""
    if _heard:
        raise KeyboardInterrupt


@contextmanager
def _hearing() -> Iterator[None]:
    """A region in which Ctrl-C is an exception, and remembered; before, the script `opsmith` leaves."""
    global _heard
    _heard = False
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
        _heard = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True
    raise KeyboardInterrupt


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A region that may take over a second: a terminal at stderr shows what it does meanwhile."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def complain(error: Exception) -> None:
    """Say what is wrong, on stderr."""
    typer.echo(f"opsmith: {error}", err=True)
