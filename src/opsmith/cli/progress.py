"""The bar that shows how far a command is: on a terminal at stderr, and gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

from opsmith.cli.guard import raise_interruption

Advance = Callable[[str, int, int], None]
"""Says what is done, the how manieth it is, and of how many."""


@contextmanager
def progress_bar(first: str = "", *, threaded: bool = True) -> Iterator[Advance]:
    """A bar, and what moves it on; where stderr is no terminal, that only hears Ctrl-C.

    Args:
        first: What is done first.
        threaded: Whether a thread of its own draws it. Without, it is drawn when it is moved on, so that
            nothing runs beside what is timed.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=threaded
    ) as bar:
        task = bar.add_task(escape(first), total=None)
        if not threaded:
            bar.refresh()

        def advance(what: str, done: int, total: int) -> None:
            raise_interruption()
            bar.update(task, description=escape(what), completed=done, total=total)
            if not threaded:
                bar.refresh()

        yield advance
