"""Runs of the example that trains a RedNet, for its tests: quick ones, and what they left."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "examples" / "rednet_digits"
QUICK = ("--images", "64", "--batch", "32")  # two steps an epoch
FILES = ["best.pt", "curve.png", "curve.svg", "history.json", "last.pt"]


def module(name: str) -> Any:
    return importlib.import_module(name)


def command(out: Path, *options: str, epochs: int = 3) -> int:
    arguments = ["--epochs", str(epochs), *QUICK, "--out", str(out), *options]
    status: int = module("train").main(arguments)
    return status


def contents(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Return whether two states are the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
