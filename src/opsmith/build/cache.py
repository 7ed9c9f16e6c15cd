"""Cache of built kernels, in memory and on disk, which many processes may use at once.

An entry is a directory of files, and a manifest of their digests. It is written under a temporary name and
renamed when it is complete, so that a killed process leaves no partial entry. With a lock for each key one
process builds, while the others wait. The system releases the lock when the process that has it ends. An
entry that cannot be stored is built for this process alone.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from opsmith import config, errors
from opsmith.config import CACHE
from opsmith.core.caller_warning import warn_caller

LOCKS = "locks"
MANIFEST = "manifest.json"
OTHERS = stat.S_IWGRP | stat.S_IWOTH
WAIT_S = 300.0
"""Seconds to wait for a different process that builds the same entry, since that process may hang."""

COMPILED_NOW = "compiled now"
"""Text for the origin of an entry that this process has built."""

Build = Callable[[Path], None]
"""Function that fills an empty directory with files."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Built entry.

    Attributes:
        directory: Directory of the files.
        source: Origin: `memory`, `disk` or `built`; `private` if it was built and could not be stored.
        reason: Reason why it could not be stored; empty otherwise.
    """

    directory: Path
    source: Literal["memory", "disk", "built", "private"]
    reason: str = ""

    @property
    def origin(self) -> str:
        """Text for the origin, for reports."""
        if self.source == "private":
            return f"compiled now, for this process alone: {self.reason}"
        return COMPILED_NOW if self.source == "built" else "from the cache"


class Cache:
    """Cache in one directory.

    Args:
        directory: The directory; it is created on first use, for this user alone.
        wait_s: Seconds to wait for a different process that builds the same entry.
    """

    def __init__(self, directory: Path, *, wait_s: float = WAIT_S) -> None:
        self.directory = directory
        self._wait_s = wait_s
        self._known: dict[str, Path] = {}
        self._unusable = ""
        self._warned = False

    def obtain(self, parts: Mapping[str, str], build: Build) -> CacheEntry:
        """Return the entry for these parts: from memory, from disk, or built now.

        Args:
            parts: Everything that the entry depends on, by name.
            build: Fills a new directory if there is no entry. Its exceptions are raised.

        Raises:
            CacheError: If other users can write into the directory, or nothing can be written anywhere.
        """
        key = key_of(parts)
        known = self._known.get(key)
        if known is not None and known.is_dir():
            return CacheEntry(known, "memory")
        try:
            entry = self._from_disk(key, parts, build)
        except _NotStoredError as failure:
            entry = CacheEntry(_private(build, parts, failure.reason), "private", failure.reason)
        self._known[key] = entry.directory
        if entry.reason:
            self._warn(entry.reason)  # this is last, because a filter may turn it into an exception
        return entry

    def find(self, parts: Mapping[str, str]) -> CacheEntry | None:
        """Return the entry for these parts; None if it is not built.

        Raises:
            CacheError: See `obtain`.
        """
        key = key_of(parts)
        if self._unusable or not os.path.isdir(self.directory):  # false, too, if this user may not read it
            return None
        path = own_directory(self.directory, CACHE) / key
        return CacheEntry(path, "disk") if is_sound(path, key) else None

    def abandon(self, reason: str) -> None:
        """Stop storing and loading entries in this process, which then builds for itself alone.

        Args:
            reason: Reason why the directory cannot be used.
        """
        self._unusable = reason
        self._known.clear()

    def _warn(self, reason: str) -> None:
        if not self._warned:
            warn_caller(
                f"kernels are built for this process alone, and not kept in {self.directory}: {reason}"
            )
            self._warned = True

    def entries(self) -> list[Path]:
        """Return the directories of all entries on disk, in order of their names.

        Raises:
            CacheError: If other users can write into the directory.
        """
        if not self.directory.is_dir():
            return []
        directory = own_directory(self.directory, CACHE)
        return sorted(path for path in directory.iterdir() if is_sound(path, path.name))

    def clear(self) -> int:
        """Remove all entries from the disk, and return their number. Loaded kernels can still run.

        Raises:
            CacheError: If other users can write into the directory.
        """
        found = self.entries()
        if self.directory.is_dir():
            for path in own_directory(self.directory, CACHE).iterdir():
                if path.is_dir() and path.name != LOCKS:
                    _remove(path)
        self._known.clear()
        return len(found)

    def discard(self, entry: CacheEntry) -> None:
        """Remove an entry that cannot be used, so that it is built again."""
        self._known = {key: path for key, path in self._known.items() if path != entry.directory}
        _remove(entry.directory)

    def _from_disk(self, key: str, parts: Mapping[str, str], build: Build) -> CacheEntry:
        if self._unusable:
            raise _NotStoredError(self._unusable)
        try:
            for missing in (*reversed(self.directory.parents), self.directory):
                missing.mkdir(mode=0o700, exist_ok=True)  # `parents=True` ignores the mode
        except OSError as error:
            raise _NotStoredError(error) from error
        from filelock import FileLock, Timeout  # imported only when something is built

        directory = own_directory(self.directory, CACHE)
        path, locks = directory / key, directory / LOCKS
        if is_sound(path, key):
            return CacheEntry(path, "disk")
        try:
            locks.mkdir(mode=0o700, exist_ok=True)
            with FileLock(locks / f"{key}.lock", timeout=self._wait_s):
                if is_sound(path, key):
                    return CacheEntry(path, "disk")
                self._make(path, parts, build)
        except Timeout as error:
            raise _NotStoredError(f"another process has been building it for {self._wait_s:.0f} s") from error
        except (OSError, NotImplementedError) as error:  # OSError if the file system has no locks
            raise _NotStoredError(error) from error
        return CacheEntry(path, "built")

    def _make(self, path: Path, parts: Mapping[str, str], build: Build) -> None:
        """Build in a temporary directory and rename it; older files of this entry are leftovers."""
        for leftover in (path, *path.parent.glob(f".{path.name}-*")):
            _remove(leftover)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            build(scratch)
            seal(scratch, parts)
            scratch.rename(path)
        except BaseException:
            _remove(scratch)
            raise


@functools.cache
def cache_on_disk() -> Cache:
    """Return the cache of this process, in the configured directory."""
    return Cache(config.cache_directory())


class _NotStoredError(Exception):
    """An entry cannot be stored on disk, for a reason that does not depend on its content."""

    def __init__(self, reason: Exception | str) -> None:
        self.reason = str(reason)
        super().__init__(self.reason)


def _private(build: Build, parts: Mapping[str, str], reason: str) -> Path:
    """Build in a directory that is removed when this process ends."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix="opsmith-"))
        atexit.register(_remove_of, os.getpid(), scratch)
        build(scratch)
        seal(scratch, parts)
    except OSError as error:
        raise errors.CacheError(
            "a kernel cannot be built, because no file can be written",
            expected="room in the cache, or in the directory for temporary files",
            got=f"in the cache: {reason}; for temporary files: {error}",
            hint=f"make room, or set {CACHE} to a directory that can be written",
        ) from error
    return scratch


def _remove_of(process: int, path: Path) -> None:
    """Remove a directory of this process; a forked child, which ends earlier, does not remove it."""
    if os.getpid() == process:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a file or a directory, which a different process may remove at the same time."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def key_of(parts: Mapping[str, str]) -> str:
    """Return the key of an entry that is built from these parts: source, flags, compiler and so on.

    Example:
        >>> key_of({"source": "a", "flags": "b"}) == key_of({"flags": "b", "source": "a"})
        True
        >>> key_of({"source": "ab", "flags": ""}) == key_of({"source": "a", "flags": "b"})
        False
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def seal(directory: Path, parts: Mapping[str, str]) -> None:
    """Write the manifest of the files in a directory, and flush the files to the disk; remove the rest."""
    digests = {}
    for path in sorted(directory.iterdir()):
        if not stat.S_ISREG(path.lstat().st_mode):  # such as the files of a compiler's `-save-temps`
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            continue
        digests[path.name] = digest_of(path)
        path.chmod(path.stat().st_mode & ~OTHERS)
        flush(path)
    manifest = {"key": key_of(parts), "parts": dict(parts), "files": digests}
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True))
    path.chmod(path.stat().st_mode & ~OTHERS)
    flush(path)
    flush(directory)


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Exceptions of a manifest that is missing, truncated or damaged."""


def is_sound(directory: Path, key: str) -> bool:
    """Return True if a directory is the complete and unchanged entry of this key."""
    try:
        manifest = json.loads(content_of(directory / MANIFEST))
        files = manifest["files"]
        return bool(
            all(_fault(path, shared=False) is None for path in (directory, *directory.iterdir()))
            and manifest["key"] == key == key_of(manifest["parts"])
            and {path.name for path in directory.iterdir()} == {*files, MANIFEST}
            and all(digest_of(directory / name) == digest for name, digest in files.items())
        )
    except _UNREADABLE:
        return False


def parts_of(directory: Path) -> dict[str, str]:
    """Return the parts of an entry; empty if its manifest cannot be read."""
    try:
        parts = json.loads(content_of(directory / MANIFEST))["parts"]
        return {str(name): str(value) for name, value in parts.items()}
    except _UNREADABLE:
        return {}


def digest_of(path: Path) -> str:
    """Return the digest of a regular file.

    Raises:
        OSError, ValueError: See `content_of`.
    """
    return hashlib.sha256(content_of(path)).hexdigest()


def content_of(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is a link or a directory.
    """
    if not stat.S_ISREG(path.lstat().st_mode):  # a link may point to a file that anyone can change
        raise ValueError(f"{path} is not a regular file")
    return path.read_bytes()


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open directories
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def own_directory(directory: Path, variable: str) -> Path:
    """Return the real path of a directory that other users can neither write into nor replace.

    A library from there would run the other user's code as this user. Each directory on the path, including
    directories of links and of their targets, must belong to this user, root or the owner of `/`. Other users
    must not be able to replace its entries. The returned path has no links, which could point elsewhere
    later. On Windows nothing is checked: it has no permission bits, and it separates profiles.

    Args:
        directory: An existing directory.
        variable: Environment variable that configures the directory, for the message.

    Raises:
        CacheError: If a different user can create files there.
    """
    resolved = directory.resolve()
    if os.name == "nt":
        return resolved
    faults = ((path, _fault(path, shared=path != resolved)) for path in (resolved, *_way(directory)))
    at, fault = next(((path, fault) for path, fault in faults if fault is not None), (resolved, None))
    if fault is not None:
        raise errors.CacheError(
            "other users can write into the cache directory of built kernels",
            expected="a directory that this user owns, and that nobody else can write into",
            got=f"{at}: {fault}",
            hint=f"run `chmod go-w {at}` if you own it, or set {variable} to a directory that you own",
        )
    return resolved


def _way(directory: Path) -> list[Path]:
    """Return the links and directories on the way to a directory; the nearest to the root is last."""
    way: dict[Path, None] = {}
    waiting = [directory.absolute()]
    while waiting:
        path = waiting.pop()
        for each in (path, *path.parents):
            if each in way:
                continue
            way[each] = None
            if each.is_symlink():
                waiting.append(each.parent / each.readlink())
    return sorted(way, key=lambda path: -len(path.parts))


def _fault(path: Path, *, shared: bool) -> str | None:
    """Return the fault of a file, directory or link. Parents may belong to root, or have a sticky bit.

    In a user namespace without root, as in Apptainer or bubblewrap, root's files seem to belong to a
    different user, who also owns `/`.
    """
    state = path.lstat()
    owners = {os.geteuid(), *({0, Path(os.sep).lstat().st_uid} if shared else ())}
    if state.st_uid not in owners:
        return f"it belongs to user {state.st_uid}, but this process runs as user {os.geteuid()}"
    if stat.S_ISLNK(state.st_mode):  # the bits of its directory decide who may replace it, not its own bits
        return None
    if state.st_mode & OTHERS and not (shared and state.st_mode & stat.S_ISVTX):
        return f"its mode is {stat.S_IMODE(state.st_mode):o}, so others can write into it"
    return None
