"""Stages of the tour: context and result of a stage, files of results and weights, a progress bar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from opsmith.core.output_file import replacing
from opsmith.display import short_repr


@dataclass(frozen=True)
class TourContext:
    """Arguments of every stage.

    Args:
        out: Folder for results.
        device: Device on which networks are trained.
        console: Console on which a stage prints its results.
        linear_steps: Optimizer steps of the linear fit.
        digits_epochs: Passes over the handwritten digits.
        seed: Seed of every random number.
        decoder_seconds: Time for which the language model writes text.
    """

    __repr__ = short_repr

    out: Path
    device: torch.device
    console: Console
    linear_steps: int = 300
    digits_epochs: int = 15
    seed: int = 0
    decoder_seconds: float = 5.0


@dataclass(frozen=True)
class StageResult:
    """Result of a stage.

    Args:
        passed: True if the stage reached its target.
        headline: The outcome in one line, with its figures.
        details: The figures, in JSON's types.
        files: Files that the stage wrote.
    """

    __repr__ = short_repr

    passed: bool
    headline: str
    details: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class TourStage:
    """One stage.

    Args:
        name: Short name, which `summary.json` uses.
        title: Title in one line.
        run: Function that carries it out.
        needs: Packages that it imports, beyond those that opsmith itself needs.
        background: True to run it in a second process from the start of the tour, after earlier background
            stages. It may read only the files of those stages.
        prepare: Function that the second process calls when the stage's turn comes; it builds the kernels
            that the stage needs.
    """

    __repr__ = short_repr

    name: str
    title: str
    run: Callable[[TourContext], StageResult]
    needs: tuple[str, ...] = ()
    background: bool = False
    prepare: Callable[[], object] | None = None


def write_json(path: Path, value: Any) -> Path:
    """Write a value as JSON, and return the path."""
    text = json.dumps(value, indent=2, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def read_weights(path: Path, model: torch.nn.Module) -> None:
    """Load the weights that `write_weights` wrote into a model on the CPU."""
    model.load_state_dict(torch.load(path, weights_only=True))


def write_weights(path: Path, model: torch.nn.Module) -> Path:
    """Write a model's `state_dict`, on the CPU, and return the path."""
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    with replacing(path) as temporary:
        torch.save(state, temporary)
    return path


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar that advances at each call of the yielded function; show nothing without a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, note="")

        def advance(note: str) -> None:
            bar.update(task, advance=1, note=note)

        yield advance
