"""Fixtures for tests of several examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rednet_digits_run import FOLDER


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """The modules of an example are imported as they are when Python runs one of its files."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def on_the_path() -> Iterator[None]:
    with importable(FOLDER):
        yield


@pytest.fixture(scope="module")
def decoder_on_the_path() -> Iterator[None]:
    with importable(FOLDER.with_name("decoder")):
        yield
