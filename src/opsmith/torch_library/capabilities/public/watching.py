"""No watching: only a difference between two runs tells then that a reference draws random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def watching(
    see: Callable[[Any, dict[str, Any]], None], given: Callable[[Any, Sequence[Any]], None] | None = None
) -> AbstractContextManager[Any]:
    """A region of which neither `see` nor `given` is told anything."""
    return nullcontext()


def tracing_imported() -> bool:
    """Yes, as far as anybody wants to do without."""
    return True
