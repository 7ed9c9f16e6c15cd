"""An entry of the cache: a directory of files, and a manifest that says what each of them holds."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "manifest.json"


def key_of(parts: Mapping[str, str]) -> str:
    """A name for what is built from these parts: source, flags, compiler and whatever else decides it.

    Example:
        >>> key_of({"source": "a", "flags": "b"}) == key_of({"flags": "b", "source": "a"})
        True
        >>> key_of({"source": "ab", "flags": ""}) == key_of({"source": "a", "flags": "b"})
        False
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def seal(directory: Path, parts: Mapping[str, str]) -> None:
    """Write the manifest of the files that a build left in a directory, and see all of them onto the disk."""
    digests = {}
    for path in sorted(directory.iterdir()):
        digests[path.name] = _digest(path)
        _onto_disk(path)
    manifest = {"key": key_of(parts), "parts": dict(parts), "files": digests}
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True))
    _onto_disk(path)
    _onto_disk(directory)


def is_sound(directory: Path, key: str) -> bool:
    """Whether a directory holds what was sealed under this key: every file, and each byte of it."""
    try:
        manifest = json.loads(_content(directory / MANIFEST))
        files = manifest["files"]
        return bool(
            manifest["key"] == key == key_of(manifest["parts"])
            and {path.name for path in directory.iterdir()} == {*files, MANIFEST}
            and all(_digest(directory / name) == digest for name, digest in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # gone, cut off, or another's
        return False


def parts_of(directory: Path) -> dict[str, str]:
    """What a sealed entry was built from; empty where its manifest cannot be read."""
    try:
        parts = json.loads(_content(directory / MANIFEST))["parts"]
        return {str(name): str(value) for name, value in parts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _digest(path: Path) -> str:
    return hashlib.sha256(_content(path)).hexdigest()


def _content(path: Path) -> bytes:
    if not stat.S_ISREG(path.lstat().st_mode):  # a link may lead to a file that anyone can change
        raise ValueError(f"{path} is no file of its own")
    return path.read_bytes()


def _onto_disk(path: Path) -> None:
    """Have the system write a file, or the names in a directory, so that no crash leaves half of it."""
    if path.is_dir() and os.name == "nt":
        return  # which cannot open directories
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
