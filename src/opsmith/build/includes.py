"""The headers of an author's own, which a kernel includes between quotes; they decide what is built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def folder_of(file: str | PathLike[str] | None, declared: str | None) -> str | None:
    """The folder in which a kernel's own headers are looked for: that of its file, or of its declaration.

    Args:
        file: The file of the kernel; None where its text is given.
        declared: The file in which the kernel is declared.
    """
    at = None if declared is None or not Path(declared).exists() else Path(declared).resolve().parent
    if file is None:
        return None if at is None else str(at)
    return str(((at or Path()) / file).resolve().parent)


def includes_of(text: str, folder: str | None) -> Mapping[Path, str]:
    """The headers that a text includes between quotes, and those that these include: by path, what they hold.

    What is not found there is the compiler's own, or missing, which it says itself.

    Args:
        text: Of a kernel.
        folder: Where its headers are looked for; None where that is not known.
    """
    found: dict[Path, str] = {}
    waiting = [(text, Path(folder) if folder else None)]
    while waiting:
        including, beside = waiting.pop()
        for name in _INCLUDE.findall(including):
            for start in dict.fromkeys([beside, Path(folder) if folder else None]):
                if start is None and not Path(name).is_absolute():
                    continue
                path = ((start or Path()) / name).resolve()
                if path in found:
                    break
                if path.is_file():
                    found[path] = path.read_text(encoding="utf-8", errors="replace")
                    waiting.append((found[path], path.parent))
                    break
    return found


def include_parts(text: str, folder: str | None) -> dict[str, str]:
    """The part of a key of the cache that stands for a kernel's own headers; none where it has none."""
    found = includes_of(text, folder)
    if not found:
        return {}
    return {"includes": "\0".join(f"{path}\0{held}" for path, held in sorted(found.items()))}


def has_includes(text: str) -> bool:
    """Whether a text includes anything between quotes."""
    return _INCLUDE.search(text) is not None
