"""What was built from source, kept in memory and on disk; many processes may use one directory at once.

An entry is written under another name and renamed when it is whole, so there is none that is half
written, whoever is killed and when. A lock for each key lets one process build while the others wait;
the system lets go of it when its holder ends. What cannot be kept is built for this process alone.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from opsmith import config, errors
from opsmith.build.entry import is_sound, key_of, seal
from opsmith.build.trust import refuse_foreign
from opsmith.config import CACHE

LOCKS = "locks"
WAIT_S = 300.0
"""How long to wait for another process that builds the same: one that hangs is not to hang this one."""

Build = Callable[[Path], None]
"""Fills an empty directory with files."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was built, and where from it came.

    Attributes:
        directory: Holds the files that the build made.
        source: `memory`, `disk` or `built`; `private` if it was built and could not be kept.
        reason: Why it could not be kept; empty otherwise.
    """

    directory: Path
    source: Literal["memory", "disk", "built", "private"]
    reason: str = ""


class Cache:
    """The cache in one directory.

    Args:
        directory: Made on first use, for this user alone.
        wait_s: Seconds to wait for another process that builds the same.
    """

    def __init__(self, directory: Path, *, wait_s: float = WAIT_S) -> None:
        self.directory = directory
        self._wait_s = wait_s
        self._known: dict[str, Path] = {}

    def obtain(self, parts: Mapping[str, str], build: Build) -> Entry:
        """The entry for these parts: from memory, from disk, or built now.

        Args:
            parts: All that decides what is built, by name.
            build: Called where there is none, with a directory to fill. What it raises is raised.

        Raises:
            CacheError: If the directory is not this user's alone, or nothing can be written anywhere.
        """
        key = key_of(parts)
        known = self._known.get(key)
        if known is not None and known.is_dir():
            return Entry(known, "memory")
        try:
            entry = self._from_disk(key, parts, build)
        except _NotKeptError as hindrance:
            entry = Entry(_private(build, parts, hindrance.reason), "private", hindrance.reason)
        self._known[key] = entry.directory
        return entry

    def entries(self) -> list[Path]:
        """The directories of all entries on disk, in order of their names.

        Raises:
            CacheError: If the directory is not this user's alone.
        """
        if not self.directory.is_dir():
            return []
        refuse_foreign(self.directory, CACHE)
        return sorted(path for path in self.directory.iterdir() if is_sound(path, path.name))

    def clear(self) -> int:
        """Remove every entry from the disk, and return how many there were; what is loaded goes on running.

        Raises:
            CacheError: If the directory is not this user's alone.
        """
        found = self.entries()
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                if path.is_dir() and path.name != LOCKS:
                    _remove(path)
        self._known.clear()
        return len(found)

    def _from_disk(self, key: str, parts: Mapping[str, str], build: Build) -> Entry:
        locks = self.directory / LOCKS
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _NotKeptError(error) from error
        refuse_foreign(self.directory, CACHE)
        path = self.directory / key
        if is_sound(path, key):
            return Entry(path, "disk")
        try:
            locks.mkdir(mode=0o700, exist_ok=True)
            with FileLock(locks / f"{key}.lock", timeout=self._wait_s):
                if is_sound(path, key):
                    return Entry(path, "disk")
                self._make(path, parts, build)
        except Timeout as error:
            raise _NotKeptError(f"another process has been building it for {self._wait_s:.0f} s") from error
        except (OSError, NotImplementedError) as error:  # the latter where the file system has no locks
            raise _NotKeptError(error) from error
        return Entry(path, "built")

    def _make(self, path: Path, parts: Mapping[str, str], build: Build) -> None:
        """Build beside the entry's place, and rename; under its lock, so what else is there is left over."""
        for leftover in (path, *self.directory.glob(f".{path.name}-*")):
            _remove(leftover)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=self.directory))
        try:
            build(scratch)
            seal(scratch, parts)
            scratch.rename(path)
        except BaseException:
            _remove(scratch)
            raise


@functools.cache
def cache_on_disk() -> Cache:
    """The cache of this process, in the directory that the environment names."""
    return Cache(config.cache_directory())


class _NotKeptError(Exception):
    """An entry cannot be kept on disk, for a reason that has nothing to do with what is built."""

    def __init__(self, reason: Exception | str) -> None:
        self.reason = str(reason)
        super().__init__(self.reason)


def _private(build: Build, parts: Mapping[str, str], reason: str) -> Path:
    """Build in a directory that ends with this process."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix="opsmith-"))
        atexit.register(_remove, scratch)
        build(scratch)
        seal(scratch, parts)
    except OSError as error:
        raise errors.CacheError(
            "a kernel cannot be built, as nothing can be written",
            expected="room in the cache, or in the directory for temporary files",
            got=f"in the cache: {reason}; for temporary files: {error}",
            hint=f"make room, or set {CACHE} to a directory that can be written",
        ) from error
    return scratch


def _remove(path: Path) -> None:
    """Remove a file or a directory; what another process removes meanwhile is gone all the same."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
