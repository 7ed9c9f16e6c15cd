"""Python's collection of garbage, while modules are loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Context for imports: they make hardly any garbage, and each collection would walk all modules.

    What was made counts as old afterwards, so that the next collection of young objects does not walk it.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()
