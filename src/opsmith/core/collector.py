"""Python's garbage collection, turned off while modules are loaded or a call is measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable Python's collection of reference cycles within the context."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def importing_without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during imports, then move all objects to the oldest generation.

    Imports make hardly any garbage, and each collection would visit all modules. If the process has frozen
    objects, as the command-line program does, no object is moved.
    """
    enabled = gc.isenabled()
    with without_garbage_collection():
        yield
        if enabled and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
