"""A stage of the tour: what it is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console


@dataclass(frozen=True)
class Context:
    """What every stage is given.

    Args:
        out: Folder for results.
        device: Where networks are trained.
        console: Where a stage says what it is doing.
        linear_steps: Optimizer steps of the linear fit.
        digits_epochs: Passes over the handwritten digits.
        seed: Seed of every random number.
    """

    out: Path
    device: torch.device
    console: Console
    linear_steps: int = 300
    digits_epochs: int = 15
    seed: int = 0


@dataclass(frozen=True)
class StageResult:
    """What a stage answers.

    Args:
        passed: Whether it reached its target.
        headline: The outcome in one line, with its figures.
        details: The figures, in JSON's types.
        files: What it wrote.
    """

    passed: bool
    headline: str
    details: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        name: A word for it.
        title: What it does, in a line.
        run: Does it.
        needs: Packages that it imports, beyond those that opsmith itself needs.
    """

    name: str
    title: str
    run: Callable[[Context], StageResult]
    needs: tuple[str, ...] = ()
