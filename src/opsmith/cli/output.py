"""Where what was found goes: to stdout, to a page, and if one of them takes nothing more, to stderr."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console

from opsmith import errors
from opsmith.cli.tally import Tally


class Output:
    """Stdout, as long as it takes what is written.

    Args:
        stream: The stream, as it was before anything was checked.

    Raises:
        UsageError: If it is closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        if stream is None:
            raise errors.UsageError(
                "there is no stdout to print the report on",
                expected="a terminal, a file or a pipe",
                got="it is closed",
                hint="leave `>&-` out, or write `>/dev/null` where a file is all you want",
            )
        self._stream, self._console = stream, Console(file=stream)
        self._error: OSError | None = None

    def console(self) -> Console:
        """What rich prints on, for reports of several parts."""
        told: Any = _Told(self, self._stream)
        return Console(file=told, highlight=False)

    def show(self, renderable: Any) -> None:
        """Print something that rich renders."""
        console, text = self._console, io.StringIO()
        color: Any = console.color_system
        same = Console(file=text, width=console.width, color_system=color, force_terminal=console.is_terminal)
        same.print(renderable)
        self.write(text.getvalue())

    def write(self, text: str) -> None:
        """Write text; what stdout does not take goes to stderr, so that it is not lost."""
        if self._error is None:
            try:
                self._stream.write(_in_letters_of(self._stream, text))
                self._stream.flush()
            except OSError as error:
                self._error = error
                _discard(self._stream)
            else:
                return
        if not isinstance(self._error, BrokenPipeError):  # whose reader has read enough
            sys.stderr.write(text)

    def close(self) -> None:
        """Say so if something could not be written.

        Raises:
            UsageError: With what the system says.
        """
        if self._error is not None:
            raise errors.UsageError(
                "the report cannot be written to stdout",
                got=self._error.strerror or str(self._error),
                hint="send it elsewhere, `opsmith ... > FILE`"
                + (
                    ""
                    if isinstance(self._error, BrokenPipeError)
                    else "; what stdout did not take stands above"
                ),
            )


class _Told:
    """A stream for rich that writes as `Output` does."""

    def __init__(self, output: Output, stream: TextIO) -> None:
        self._output, self.encoding = output, stream.encoding or "utf-8"
        self.isatty = stream.isatty

    def write(self, text: str) -> int:
        self._output.write(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def _in_letters_of(stream: TextIO, text: str) -> str:
    """A text with escapes for what the stream's encoding lacks."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _discard(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere: Python would try again at its end, and fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        stream.flush()


def page_writer(file: Path) -> Callable[[Tally], None]:
    """What writes the page; that it cannot be written is known before anything is checked, if it can be.

    Raises:
        UsageError: If there is no such folder, or nothing can be written there.
        MissingExtraError: If a package for it is missing.
    """
    from opsmith.checking.output.html import page

    fault = unwritable_reason(file)
    if fault is not None:
        raise _unwritable(file, fault, "make the folder first, or name another file")

    def write(tally: Tally) -> None:
        unchecked = [(entry["operator"] or "", entry["message"]) for entry in tally.unchecked_entries()]
        try:
            file.write_text(page(tally.reports, unchecked), encoding="utf-8")
        except OSError as error:
            raise _unwritable(
                file, error.strerror or str(error), "name another file; what was found is printed above"
            ) from error
        typer.echo(f"opsmith: the page is in {file}", err=True)

    return write


def unwritable_reason(file: Path) -> str | None:
    """Why nothing can be written to a file; None where it can. No empty file is left behind."""
    if file.is_dir():
        return "a folder"
    if not file.parent.is_dir():
        return f"there is no folder `{file.parent}`"
    there = file.exists()
    if there and not file.is_file():
        return None  # a pipe, or a device, whose reader would take the attempt for the page
    try:
        with file.open("a"):
            pass
        if not there:
            file.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unwritable(file: Path, got: str, hint: str) -> errors.UsageError:
    return errors.UsageError(
        f"the page cannot be written to `{file}`",
        expected="a file in a folder that is there, and can be written to",
        got=got,
        hint=hint,
    )
