"""No watching: only a difference between two runs tells then that a reference draws random numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def watching(see: Callable[[Any, dict[str, Any]], None]) -> AbstractContextManager[Any]:
    """A region of which `see` is told nothing."""
    return nullcontext()
