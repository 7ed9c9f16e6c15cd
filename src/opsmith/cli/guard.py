"""What every command does with errors: one message, no traceback, and the exit status that belongs to it."""

from __future__ import annotations

import signal
import traceback as tracebacks
from collections.abc import Iterator
from contextlib import contextmanager

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
        Exit: With status 2 for an error of opsmith, 130 for Ctrl-C. Other exceptions are mistakes in opsmith
            itself, and pass.
    """
    _hear_ctrl_c()
    try:
        yield
    except errors.OpsmithError as error:
        if traceback:
            typer.echo(tracebacks.format_exc(), err=True)
        complain(error)
        raise typer.Exit(UNUSABLE) from None
    except KeyboardInterrupt:
        typer.echo("opsmith: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _hear_ctrl_c() -> None:
    """Let Ctrl-C be an exception from here on: the script `opsmith` leaves at once before."""
    handler = signal.getsignal(signal.SIGINT)
    if getattr(handler, "__module__", None) == "opsmith_command":
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
