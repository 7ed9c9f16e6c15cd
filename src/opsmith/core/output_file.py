"""Output files: checked before the work begins, and replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from opsmith import errors


def writable_file(path: Any, example: str, argument: str = "path") -> Path:
    """The file that a path names.

    Args:
        path: A name as the user gave it.
        example: The name of a file that would do, for the hint.
        argument: The argument that the path was given as.

    Raises:
        UsageError: If no file can be written there.
    """
    if not isinstance(path, str | os.PathLike):
        hint = f"give the name of a file, `{example}`"
        raise unwritable(repr(path), type(path).__name__, hint, argument)
    name = os.fsdecode(path)
    if "\0" in name:
        raise unwritable(repr(name), "a name with a null character", argument=argument)
    file = Path(name)
    if file.is_dir():
        raise unwritable(file, "a folder", f"name a file in it, `{example}`", argument)
    if not file.parent.is_dir():
        raise unwritable(file, f"there is no folder `{file.parent}`", "make the folder first", argument)
    if file.exists() and not os.access(file, os.W_OK):
        raise unwritable(file, "it is read-only", argument=argument)
    if not os.access(file.parent, os.W_OK):
        raise unwritable(file, f"the folder `{file.parent}` is read-only", argument=argument)
    return file


def replace_file(file: Path, data: bytes) -> None:
    """Write a file; on an error nothing is left, and an earlier file stays as it was.

    Raises:
        UsageError: With the reason of the system.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        try:
            draft.write_bytes(data)
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(file, error.strerror or str(error)) from error


def unwritable(
    path: str | Path, got: str, hint: str = "name another file", argument: str = "path"
) -> errors.UsageError:
    """The error for a path that no file can be written to."""
    return errors.UsageError(
        f"no file can be written to `{path}`",
        argument=argument,
        expected="a file in a folder that is there, and can be written to",
        got=got,
        hint=hint,
    )
