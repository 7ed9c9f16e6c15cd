"""Where pages go: a file for one operator, or a folder with an index; known before anything is looked at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsmith import errors

SUFFIXES = (".html", ".htm")
INDEX = "index.html"


@dataclass(frozen=True)
class Places:
    """Where each page goes.

    Args:
        pages: A file for each operator, in their order.
        index: The file that lists them; None where there is one page alone.
    """

    pages: tuple[Path, ...]
    index: Path | None


def read_places(path: Any, names: Sequence[str]) -> Places:
    """The files that a path stands for.

    Args:
        path: A name that ends in `.html`, for one operator; else a folder, which may not be there yet.
        names: The operators' names.

    Raises:
        UsageError: If nothing can be written there, or one file is to hold several pages.

    Example:
        >>> read_places("pages", ["demo::twice"])
        Places(pages=(PosixPath('pages/demo-twice.html'),), index=PosixPath('pages/index.html'))
    """
    if not isinstance(path, str | os.PathLike):
        raise _unwritable(
            repr(path), type(path).__name__, "give the name of a file, `page.html`, or a folder"
        )
    place = Path(path)
    if place.suffix.lower() in SUFFIXES and not place.is_dir():
        if len(names) != 1:
            raise errors.UsageError(
                f"`{place}` is one file, and there are {len(names)} operators",
                argument="path",
                expected="a folder, for an index and a page for each",
                got=", ".join(f"`{name}`" for name in names),
                hint=f"write `{place.with_suffix('')}`, or name one operator",
            )
        _refuse_parent(place)
        _refuse(place)
        return Places((place,), None)
    if place.exists() and not place.is_dir():
        raise _unwritable(str(place), "a file", "name it `page.html`, or name a folder")
    if not place.exists():
        _refuse_parent(place)
    pages = tuple(place / f"{name.replace('::', '-')}.html" for name in names)
    if place.is_dir():
        for each in (*pages, place / INDEX):
            _refuse(each)
    return Places(pages, place / INDEX)


def write(file: Path, text: str) -> None:
    """Write a page, whole or not at all.

    Raises:
        UsageError: With what the system says, if it cannot be written.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(exist_ok=True)
        try:
            draft.write_text(
                text, encoding="utf-8", errors="replace"
            )  # a docstring may hold what is no UTF-8
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(str(file), error.strerror or str(error), "name another place") from error


def _refuse_parent(place: Path) -> None:
    if not place.parent.is_dir():
        raise _unwritable(str(place), f"there is no folder `{place.parent}`", "make the folder first")
    if not place.exists() and not os.access(place.parent, os.W_OK):
        raise _unwritable(str(place), f"`{place.parent}` is read-only", "name another place")


def _refuse(file: Path) -> None:
    if file.is_dir():
        raise _unwritable(str(file), "a folder", "name another place")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _unwritable(str(file), "it is read-only", "name another place")


def _unwritable(path: str, got: str, hint: str) -> errors.UsageError:
    return errors.UsageError(
        f"no page can be written to `{path}`",
        argument="path",
        expected="a file in a folder that is there, or a folder, that can be written to",
        got=got,
        hint=hint,
    )
