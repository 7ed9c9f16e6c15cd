"""A region without warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """A region without warnings: torch warns of its own insides where forward mode is first used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
