"""Folders on the command line: the files in a folder that may declare something to check."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from opsmith import errors
from opsmith.targets.target import Target, nothing_declared

_LIBRARY = re.compile(rb"\b(?:opsmith|torch)\b")
_DECLARATION = re.compile(rb"\b(?:operator|adopt|Function|custom_op)\b")


def is_folder(text: str) -> bool:
    """Return True for the path of a folder; a bare name is a module, as for `python -m`.

    Example:
        >>> is_folder("."), is_folder("opsmith")
        (True, False)
    """
    return not text.isidentifier() and os.path.isdir(text)


def targets_of(text: str, *, optional: bool = False) -> list[Target]:
    """Return the target that a text names, or the targets in a folder, in alphabetical order.

    A file of a folder is a target if its text names torch or opsmith, and a function or class that declares
    something. Only the import shows if the file really declares something. Programs (`__main__.py`), hidden
    folders and environments are left out.

    Args:
        text: `FILE_OR_MODULE[:NAME]`, or the path of a folder.
        optional: True to allow that a file or a folder has nothing to check.

    Raises:
        UsageError: If the text names neither a target nor a folder, a name follows the folder, or a folder
            cannot be read.
        OperatorNotFoundError: If no file of the folder may declare something.
    """
    path, colon, name = text.rpartition(":")
    if colon and is_folder(path):
        raise errors.UsageError(
            f"`{path}` is a folder, but `{name}` must be in a file or module",
            expected="FILE_OR_MODULE:NAME",
            hint=f"name the file: `{Path(path) / 'operators.py'}:{name}`",
        )
    folder = is_folder(text)
    target = None if folder else Target.of(text)
    if target is not None and not (optional and target.is_file and target.name is None):
        return [target]
    files = _files(Path(text)) if folder else [Path(text)]
    found = [Target(str(file), None, optional=True) for file in files if _may_declare(file)]
    if not found and not optional:
        raise nothing_declared(text)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder, then the files of its subfolders, in alphabetical order."""
    for path, folders, files in os.walk(folder, onerror=_refuse):
        inside = Path(path)
        folders[:] = sorted(
            each for each in folders if each[0] != "." and not (inside / each / "pyvenv.cfg").exists()
        )
        yield from (inside / each for each in sorted(files) if each.endswith(".py") and each != "__main__.py")


def _refuse(error: OSError) -> NoReturn:
    raise errors.UsageError(
        f"the folder `{error.filename}` cannot be read",
        got=error.strerror,
        hint="make it readable, or name the files and folders to check",
    ) from error


def _may_declare(file: Path) -> bool:
    try:
        text = file.read_bytes()
    except OSError:
        return True  # its import says why it cannot be read
    return bool(_LIBRARY.search(text) and _DECLARATION.search(text))
