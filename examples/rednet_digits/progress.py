"""Output of a run while it runs: bars on a terminal, and a line for each epoch everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from processes import Processes
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Voice:
    """Prints on rank 0; the other processes are silent."""

    def __init__(self, processes: Processes) -> None:
        self.console = Console(quiet=processes.rank > 0)

    def say(self, line: str) -> None:
        """Print a line as it is, above the bars where there are any."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def bars(self, epochs: int, done: int, steps: int) -> Iterator[Callable[[], None]]:
        """A bar of the run and one of the epoch; each call is a step of both. Without a terminal, none."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeRemainingColumn(),
        )
        shown = self.console.is_terminal and not self.console.quiet
        with Progress(*columns, console=self.console, transient=True, disable=not shown) as progress:
            run = progress.add_task("run", total=epochs * steps, completed=done * steps, unit="steps")
            epoch = progress.add_task(f"epoch {done + 1}", total=steps, unit="steps")

            def advance() -> None:
                if progress.tasks[1].finished:
                    progress.reset(epoch, description=f"epoch {progress.tasks[0].completed // steps + 1:.0f}")
                progress.advance(run)
                progress.advance(epoch)

            yield advance
