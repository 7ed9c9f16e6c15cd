"""Python's collection of garbage, turned off while modules are loaded or a call is measured."""

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
def without_collections_of_modules() -> Iterator[None]:
    """Context for imports: they make hardly any garbage, and each collection would walk all modules.

    What was made counts as old afterwards, so that the next collection of young objects does not walk it.
    """
    collected = gc.isenabled()
    with without_garbage_collection():
        yield
        if collected and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
