"""Output of commands: reports on stdout, and a progress bar on stderr."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from opsmith import errors
from opsmith.cli.console import PrintableConsole
from opsmith.cli.guard import descriptor_of, guarded, raise_interruption


class Output:
    """Stdout; stderr is its fallback.

    Args:
        stream: The stdout from before any code of the user ran.

    Attributes:
        begun: True if something was written.

    Raises:
        UsageError: If it is closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        if stream is None:
            raise errors.UsageError(
                "there is no stdout to print the report on",
                expected="a terminal, a file or a pipe",
                got="it is closed",
                hint="leave `>&-` out, or write `>/dev/null` if you only want a file",
            )
        self._stream = stream
        self._error: OSError | None = None
        self.begun = False

    def console(self, *, highlight: bool = False) -> Console:
        """Return a console of rich for reports of several parts."""
        stream: Any = _RichStream(self, self._stream)
        return PrintableConsole(file=stream, highlight=highlight)

    def show(self, renderable: Any) -> None:
        """Print a renderable of rich, with numbers and names in colour."""
        self.console(highlight=True).print(renderable)

    def write(self, text: str) -> None:
        """Write text to stdout; if that fails, to stderr, so that it is not lost."""
        self.begun = True
        if self._error is None:
            try:
                self._stream.write(_encodable(self._stream, text))
                self._stream.flush()
            except OSError as error:
                self._error = error
                _discard(self._stream)
            else:
                return
        if not isinstance(self._error, BrokenPipeError):  # the reader has closed the pipe
            sys.stderr.write(text)

    def write_json(self, value: Any) -> None:
        """Write a value as JSON."""
        self.write(json.dumps(value, indent=2, allow_nan=False) + "\n")

    def close(self) -> None:
        """Raise an error if something could not be written, except if the reader has closed the pipe.

        Raises:
            UsageError: If the system refused to write.
        """
        if self._error is not None and not isinstance(self._error, BrokenPipeError):  # as with `| head`
            raise errors.UsageError(
                "the report cannot be written to stdout",
                got=self._error.strerror or str(self._error),
                hint="write it to a file, `opsmith ... > FILE`; the part that stdout did not take is above",
            )


@contextmanager
def answering(
    *, as_json: bool = False, traceback: bool = False, failures: tuple[str, ...] = ()
) -> Iterator[Output]:
    """Context of a command: stdout gets only the result, and errors become messages on stderr.

    Args:
        as_json: Write an error as a JSON object to stdout, too, if nothing was written there.
        traceback: Print the traceback of an error, too.
        failures: Names of the errors that concern the subject of the command, and not the way it was called.

    Raises:
        Exit: With the status of an error; see `guarded`.
    """
    frame = guarded(traceback=traceback, failures=failures)
    with frame, _opened_stderr(), _reserved(sys.stdout) as stdout, redirect_stdout(sys.stderr):
        output = Output(stdout)
        try:
            yield output
        except errors.OpsmithError as error:
            if as_json and not output.begun:
                output.write_json({"error": str(error)})
            raise
        output.close()


@contextmanager
def _opened_stderr() -> Iterator[None]:
    """Replace a closed stderr, as with `2>&-`, by a stream that discards everything."""
    if sys.stderr is not None:
        yield
        return
    with open(os.devnull, "w") as nothing, redirect_stderr(nothing):
        yield


@contextmanager
def _reserved(stdout: TextIO | None) -> Iterator[TextIO | None]:
    """Yield a stream to the real stdout; meanwhile descriptor 1 leads to stderr, so kernels print there.

    Args:
        stdout: Stdout; it is yielded unchanged unless it is the stdout of the process.
    """
    if stdout is None or descriptor_of(stdout) != 1:
        yield stdout
        return
    stdout.flush()
    with open(os.dup(1), "w", encoding=stdout.encoding, errors=stdout.errors) as kept:
        os.dup2(descriptor_of(sys.stderr) or 2, 1)
        try:
            yield kept
        finally:
            stdout.flush()
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept.fileno(), 1)


def columns(*headings: str, right: Collection[str] = (), whole: bool = False) -> Table:
    """Return a table without rows.

    Args:
        headings: Headings of the columns.
        right: Headings of the columns of numbers.
        whole: True to keep headings on one line.
    """
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in headings:
        rows.add_column(
            heading,
            overflow="fold",
            min_width=len(heading) if whole else None,
            justify="right" if heading in right else "left",
        )
    return rows


class _RichStream:
    """A stream for rich that writes through an `Output`."""

    def __init__(self, output: Output, stream: TextIO) -> None:
        self._output, self.encoding = output, stream.encoding or "utf-8"
        self.isatty = stream.isatty

    def write(self, text: str) -> int:
        self._output.write(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


def _encodable(stream: TextIO, text: str) -> str:
    """Escape the characters that the encoding of a stream lacks."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _discard(stream: TextIO) -> None:
    """Discard the buffer of a stream, which Python would otherwise try to write again at exit, and fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        stream.flush()


Advance = Callable[[str, int, int], None]
"""Function of the current activity, the number of finished activities, and their total."""


@contextmanager
def progress_bar(subject: str = "", first: str = "", *, threaded: bool = True) -> Iterator[Advance]:
    """Show a progress bar if stderr is a terminal, and yield the function that advances it.

    Args:
        subject: Name that is shown before each activity.
        first: The first activity.
        threaded: True to draw it in its own thread. Otherwise it is drawn when it advances, so that it does
            not disturb a benchmark.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = PrintableConsole(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=threaded
    ) as bar:
        task = bar.add_task(escape(f"{subject} {first}".strip()), total=None)
        if not threaded:
            bar.refresh()

        def advance(activity: str, done: int, total: int) -> None:
            raise_interruption()
            description = escape(f"{subject} {activity}".strip())
            bar.update(task, description=description, completed=done, total=total)
            if not threaded:
                bar.refresh()

        yield advance
