"""Output files: checked before the work begins, replaced as a whole; hashes for content security policies."""

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
        example: An example of a valid file name, for the hint.
        argument: Name of the argument for the path.

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
    try:
        try_to_write(file)
        if file.is_file():
            try_to_write(_draft(file))  # which replaces it
    except OSError as error:
        hint = _HINTS.get(type(error), "name another file").format(example=example)
        raise unwritable(file, error, hint, argument) from error
    return file


_HINTS: dict[type[OSError], str] = {
    IsADirectoryError: "name a file in this folder, `{example}`",
    NotADirectoryError: "make the folder first",
}


def try_to_write(file: Path) -> None:
    """Try to write a file: an existing file stays unchanged, and no empty file is left behind.

    A pipe or a device is not tried, since its reader would notice.

    Raises:
        OSError: With the reason why it cannot be written.
    """
    if file.is_dir():
        raise IsADirectoryError("a folder")
    if not file.parent.is_dir():
        raise NotADirectoryError(f"there is no folder `{file.parent}`")
    existed = file.exists()
    if not existed or file.is_file():
        file.open("a").close()
    if not existed:
        file.resolve().unlink()  # resolved, so that a dangling link stays


def replace_file(file: Path, data: bytes) -> None:
    """Write a file; after an error, no partial file is left, and an existing file is unchanged.

    Raises:
        UsageError: With the reason of the system.
    """
    try:
        if file.exists() and not file.is_file():  # a pipe or a device
            file.write_bytes(data)
            return
        with replacing(file) as draft:
            draft.write_bytes(data)
    except OSError as error:
        raise unwritable(file, error) from error


def _draft(file: Path) -> Path:
    return file.with_name(f".{file.name}.{os.getpid()}")


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
    draft = _draft(path)
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def unwritable(
    path: str | Path,
    got: str | OSError,
    hint: str = "name another file",
    argument: str | None = "path",
) -> errors.UsageError:
    """The error for a path to which no file, or not this content, can be written."""
    return errors.UsageError(
        f"no file can be written to `{path}`",
        argument=argument,
        expected="a file in an existing folder that can be written to",
        got=got if isinstance(got, str) else got.strerror or str(got),
        hint=hint,
    )


def policy_hash(text: str) -> str:
    """Return the hash with which the content security policy of a page allows a script or a style sheet.

    Example:
        >>> policy_hash("")
        'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
