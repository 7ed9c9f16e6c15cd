"""Python's collection of garbage while modules are loaded."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import suppress

import pytest

from opsmith.core.collector import importing_without_garbage_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_off_within_and_as_before_afterwards(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(ValueError), importing_without_garbage_collection():
            found = gc.isenabled()
            raise ValueError("within")
        assert not found
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


PROGRAM = """
import gc
import subprocess
import sys
from opsmith.core.collector import importing_without_garbage_collection

def made_old(frozen):
    gc.collect()
    if frozen:
        gc.freeze()
    with importing_without_garbage_collection():
        made = [[] for _ in range(5000)]
    kept = gc.get_freeze_count() > 0
    old = {id(each) for each in gc.get_objects(generation=2)}
    gc.unfreeze()
    return kept, all(id(each) in old for each in made)

print(made_old(False), made_old(True))
"""


@pytest.mark.slow
def test_what_was_made_counts_as_old_and_what_was_frozen_stays_so() -> None:
    """In a process of its own: the suite's freezes objects itself."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True)
    assert done.stdout == "(False, True) (True, False)\n"
