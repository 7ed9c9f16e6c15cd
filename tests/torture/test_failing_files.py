"""Every file operation of the cache fails in turn: the call is right or says so, and the next is right."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from opsmith import errors
from opsmith.build.cache import Cache, CacheEntry
from opsmith.build.dependencies import PREPROCESSED, Dependencies, PreprocessedText, obtain_with_dependencies

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:kernels are built for this process alone:RuntimeWarning"),
]

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EINTR)
OPERATIONS: list[tuple[Any, str]] = [
    *((os, name) for name in ("open", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "chmod")),
    *((os, name) for name in ("listdir", "scandir", "write", "lstat")),
    (fcntl, "flock"),
    (io, "open"),
    (builtins, "open"),
]


@contextmanager
def failing(at: int, number: int) -> Iterator[list[str]]:
    """Count the operations of the region, whose names it yields; the one at a position fails."""
    seen: list[str] = []

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(f"{name} {args[0]!r}")
            if len(seen) == at:
                raise OSError(number, os.strerror(number), str(args[0]))
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in OPERATIONS:
            stack.enter_context(mock.patch.object(owner, name, wrapped(name, getattr(owner, name))))
        yield seen


def obtained(folder: Path) -> CacheEntry:
    """Obtain a library that is compiled from a header."""
    header = folder / "value.h"

    def preprocessed() -> PreprocessedText:
        return PreprocessedText(header.read_text(), Dependencies.now([str(header)], [str(folder)]))

    def build(directory: Path) -> None:
        (directory / "library.so").write_text(f"compiled: {(directory / PREPROCESSED).read_text()}")

    return obtain_with_dependencies(Cache(folder / "cache"), {"text": "a"}, preprocessed, build)[0]


def is_right(entry: CacheEntry, value: str) -> bool:
    return (entry.directory / "library.so").read_text() == f"compiled: {value}"


def prepared(folder: Path, *, warm: bool) -> None:
    """Write a header; warm: with an entry of it, and another one before."""
    for value in ("old", "right") if warm else ("right",):
        (folder / "value.h").write_text(value)
        if warm:
            obtained(folder)


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_file_operation_that_fails(tmp_path: Path, number: int, *, warm: bool) -> None:
    at, right, refused = 0, 0, 0
    while True:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        prepared(folder, warm=warm)
        entry: CacheEntry | None = None
        refusal: Exception | None = None
        with failing(at, number) as seen:
            try:
                entry = obtained(folder)
            except (errors.CacheError, OSError) as error:
                refusal = error
        if refusal is not None:  # an OSError is of the header, which this test itself reads
            own = isinstance(refusal, OSError) and "value.h" in str(refusal.filename)
            assert own or os.strerror(number) in str(refusal), seen[at - 1]
            refused += 1
        if entry is not None:
            assert is_right(entry, "right"), seen[at - 1 :]
            right += 1
        assert is_right(obtained(folder), "right"), seen[at - 1]
        (folder / "value.h").write_text("new")
        assert is_right(obtained(folder), "new"), seen[at - 1]
        if len(seen) < at:
            break
    sys.stdout.write(f"{at - 1} operations: {right - 1} calls right, {refused} refused\n")
    assert at > (10 if warm else 40)
