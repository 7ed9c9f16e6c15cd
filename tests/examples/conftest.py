"""Fixtures for tests of several examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from rednet_digits_run import FOLDER


@pytest.fixture(scope="module")
def on_the_path() -> Iterator[None]:
    """The modules of examples/rednet_digits are imported as they are when Python runs its file `train.py`."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)
