"""Where a picture goes, and of what kind it is; looked at before anything is traced."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsmith import errors

FORMATS = {
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
    ".dot": "dot",
    ".gv": "dot",
    ".html": "html",
    ".htm": "html",
    ".json": "json",
}
"""Format by suffix."""
PICTURES = ("svg", "png", "pdf")
"""Those that Graphviz makes."""


@dataclass(frozen=True)
class Target:
    """A file to be written.

    Args:
        path: Where.
        form: What: one of `FORMATS`.
    """

    path: Path
    form: str

    def write(self, data: bytes) -> None:
        """Write it.

        Raises:
            UsageError: With what the system says, if it cannot be written.
        """
        try:
            self.path.write_bytes(data)
        except OSError as error:
            raise _unwritable(str(self.path), error.strerror or str(error), "name another file") from error


def read_target(path: Any) -> Target:
    """The file that a path names.

    Raises:
        UsageError: If the suffix is of no format, or nothing can be written there.
    """
    if not isinstance(path, str | os.PathLike):
        raise _unwritable(repr(path), type(path).__name__, "give the name of a file, `graph.svg`")
    if "\0" in os.fsdecode(path):
        raise _unwritable(repr(os.fsdecode(path)), "a name with a null character", "name another file")
    file = Path(os.fsdecode(path))
    form = FORMATS.get(file.suffix.lower())
    if form is None:
        raise errors.UsageError(
            "a graph is not drawn in this format",
            argument="path",
            expected=f"a name that ends in {', '.join(FORMATS)}",
            got=f"`{file}`",
            hint=f"write `{file.with_suffix('.svg')}`" if file.name else "write `graph.svg`",
        )
    if file.is_dir():
        raise _unwritable(str(file), "a folder", "name a file in it, `graph.svg`")
    if not file.parent.is_dir():
        raise _unwritable(str(file), f"there is no folder `{file.parent}`", "make the folder first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _unwritable(str(file), "it is read-only", "name another file")
    return Target(file, form)


def _unwritable(path: str, got: str, hint: str) -> errors.UsageError:
    return errors.UsageError(
        f"no file can be written to `{path}`",
        argument="path",
        expected="a file in a folder that is there, and can be written to",
        got=got,
        hint=hint,
    )
