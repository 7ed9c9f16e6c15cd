"""Files that are whole or not there: whoever reads one never sees half of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end; an exception, also Ctrl-C, leaves nothing of it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with replacing(folder / "greeting") as path:
        ...     _ = path.write_text("hello")
        >>> [path.name for path in folder.iterdir()]
        ['greeting']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> Path:
    """Write a value as JSON, and return the path."""
    text = json.dumps(value, indent=2, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def read_weights(path: Path, model: torch.nn.Module) -> None:
    """Give a model, on the CPU, the weights that `write_weights` has written."""
    model.load_state_dict(torch.load(path, weights_only=True))


def write_weights(path: Path, model: torch.nn.Module) -> Path:
    """Write a model's `state_dict`, on the CPU, and return the path."""
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    with replacing(path) as temporary:
        torch.save(state, temporary)
    return path
