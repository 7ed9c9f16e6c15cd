"""Output files: checked before the work begins, replaced as a whole; hashes for the policies of pages."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    try:
        with replacing(file) as draft:
            draft.write_bytes(data)
    except OSError as error:
        raise unwritable(file, error.strerror or str(error)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end; after an exception `path` is unchanged.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with replacing(folder / "greeting") as draft:
        ...     _ = draft.write_text("hello")
        >>> [path.name for path in folder.iterdir()]
        ['greeting']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


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


def policy_hash(text: str) -> str:
    """Return the hash by which the content security policy of a page admits a script or a style sheet.

    Example:
        >>> policy_hash("")
        'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
