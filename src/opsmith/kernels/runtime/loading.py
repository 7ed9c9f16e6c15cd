"""Files of libraries, from a package or the cache, after a test that they can be loaded."""

from __future__ import annotations

import ctypes
import filecmp
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsmith import errors
from opsmith.build.cache import CacheEntry, cache_on_disk
from opsmith.build.elf import SONAME, dynamic_texts, fault_of
from opsmith.build.packaged import Found

LIBRARY = "kernel.so"
"""Name of a library's file in the cache."""
_MAPPED = Path("/proc/self/maps")
"""List of the libraries that this process has loaded; kernels in C++ are built only on Linux."""


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """File of a library that can be loaded.

    Attributes:
        path: Path of the file.
        origin: Origin of the file in words.
    """

    path: str
    origin: str


def packaged_library(found: Found, exported: str, linked: Sequence[Path] = ()) -> LibraryFile | None:
    """Return the best loadable library among a package's built kernels; None if there is none.

    Args:
        found: Result of the search.
        exported: Name that the library exports.
        linked: Files of shared libraries that it is linked with. It names them without folders, so the loader
            uses a library of the same name that the process has already loaded.
    """
    others = [other for each in linked for other in others_of_name(each)]
    for built, path, _ in found.usable():
        if others:
            found.rejected[path] = f"the process has loaded a different library of the same name, {others[0]}"
            continue
        try:
            getattr(ctypes.CDLL(str(path)), exported)
        except (OSError, AttributeError) as error:
            found.reject(path, f"it cannot be loaded: {error}")
            continue
        return LibraryFile(str(path), f"built into the package for {built.target}")
    return None


def others_of_name(library: Path) -> list[Path]:
    """Return the loaded libraries of different content that the loader uses for this name."""
    own = library.resolve()
    names = {library.name, own.name}
    if fault_of(own) is None:
        names |= {*dynamic_texts(own.read_bytes(), SONAME)}
    mapped = {line.split(maxsplit=5)[-1] for line in _MAPPED.read_text().splitlines()}
    named = [Path(each) for each in sorted(mapped) if os.path.basename(each) in names]
    return [each for each in named if each != own and not (own.is_file() and _are_equal(each, own))]


def _are_equal(one: Path, other: Path) -> bool:
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:  # it was deleted after it was loaded
        return False


def refuse_other_library(linked: Sequence[Path]) -> None:
    """Refuse a loaded kernel if the loader used different libraries from the ones in its link options.

    Args:
        linked: Files of shared libraries.

    Raises:
        CompileError: If a different library of the same name is loaded.
    """
    loaded = _MAPPED.read_text() if linked else ""
    for each in linked:
        others = others_of_name(each)
        if others and f" {each.resolve()}\n" not in loaded:
            raise errors.CompileError(
                "a process loads one library of each name, but it has loaded a different library of this "
                "name",
                argument="libraries",
                expected=str(each),
                got=str(others[0]),
                hint="give the file of the library a unique name, and link it with `-Wl,-soname,` and this "
                "name",
            )


def loadable(obtain: Callable[[], CacheEntry], exported: str) -> LibraryFile:
    """Return an entry's library; if a cached library cannot be loaded, it is rebuilt once.

    Args:
        obtain: Function that returns the entry.
        exported: Name that the library exports.

    Raises:
        CompileError: If a new library cannot be loaded, or does not export that name.
    """
    entry = obtain()
    path = str(entry.directory / LIBRARY)
    try:
        getattr(ctypes.CDLL(path), exported)
    except (OSError, AttributeError) as error:
        if entry.source in ("disk", "built") and _runs_nothing(entry.directory):
            cache_on_disk().abandon("no program can be run from its file system (noexec)")
            return loadable(obtain, exported)
        if entry.source == "disk":
            cache_on_disk().discard(entry)
            return loadable(obtain, exported)
        absent = re.match(r"(\S+): cannot open shared object file", str(error))
        raise errors.CompileError(
            "the compiled kernel cannot be loaded",
            got=str(error),
            hint=f"give the path of `{absent[1]}` in `libraries=`, or put its folder into LD_LIBRARY_PATH"
            if absent
            else "check that every library that the kernel needs is installed, and that CXX is this "
            "machine's compiler",
        ) from error
    return LibraryFile(path, entry.origin)


def _runs_nothing(directory: Path) -> bool:
    """Return True for a directory on a file system that is mounted with `noexec`."""
    return hasattr(os, "statvfs") and bool(os.statvfs(directory).f_flag & os.ST_NOEXEC)
