"""Output of a run while it runs: a bar on a terminal, and lines everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Voice:
    """Prints lines, above a bar where there is one."""

    def __init__(self) -> None:
        self.console = Console()

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar that each call advances by one; without a terminal, none."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        shown = self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=not shown) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)
