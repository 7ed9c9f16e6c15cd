"""Dependencies of a compilation: its preprocessed text, the included files, and the searched folders.

The compiler reads the preprocessed text, and the key of a built kernel is computed from the same text, so
that no header can change in between. The preprocessor takes a tenth of a second. It is not run if no file and
no folder has changed since an earlier run: its text is then known.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from opsmith import errors
from opsmith.build.cache import Build, Cache, CacheEntry, key_of
from opsmith.build.source_text import named_files
from opsmith.build.toolchain import Toolchain

SOURCE, PREPROCESSED = "kernel.cpp", "kernel.ii"
REMEMBERED = 8
"""Maximum number of texts stored for one source; branches of a repository may have different texts."""
INDEX = "index"
"""Folder in a cache that contains the stored dependencies."""
ATTEMPTS = 4
"""Maximum number of preprocessor runs until two runs see the same files."""

_ENTERED = re.compile(r'^# \d+ "((?:\\.|[^"\\\n])+)" 1((?: \d)*)$', re.MULTILINE)
_FOLDER_MARKER = re.compile(r'^# \d+ "/.*//"\n', re.MULTILINE)
_MARKED = r'^# \d+ "'
_BEGINNING = r"""(?:^|[\s=:,"'\0])(?:-[A-Za-z]+)?"""
"""Text before a path: in line markers, then in flags and environment variables."""
_SYSTEM_HEADER = "3"
_SEARCHED = re.compile(r"^ (/.*?)(?: \(framework directory\))?$", re.MULTILINE)
_MISSING = re.compile(r'^ignoring nonexistent directory "(/.*)"$', re.MULTILINE)

_refused: dict[tuple[str, str], errors.CompileError] = {}
"""Errors of texts that the compiler refused in this process, by the source's key and the digest."""

State = tuple[int, ...]
"""Size, inode and times of a file or folder, which show a change; empty if it is missing."""


class PreprocessorError(Exception):
    """The preprocessor refuses a text.

    Attributes:
        printed: Its output.
    """

    def __init__(self, printed: str) -> None:
        self.printed = printed
        super().__init__(printed)


class _OtherTextError(Exception):
    """The preprocessed text differs from the text of the key."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Files in a preprocessed text, and searched folders, in their state at that time.

    Attributes:
        files: State and digest of each file, by path.
        folders: State of each folder, and digest of the names in it: a new file may take precedence over an
            included one.
    """

    files: Mapping[str, tuple[State, str]]
    folders: Mapping[str, tuple[State, str]]

    @classmethod
    def now(cls, files: Iterable[str], folders: Iterable[str]) -> Self:
        """Return the same files and folders in their current state."""
        return cls(
            {path: (_state(path), _digest(path)) for path in files},
            {path: (_state(path), _names(path)) for path in folders},
        )

    @classmethod
    def read(cls, held: Mapping[str, Mapping[str, tuple[Sequence[int], str]]]) -> Self:
        """Return the dependencies from their JSON form."""
        kinds = [
            {str(path): (tuple(state), str(digest)) for path, (state, digest) in held[name].items()}
            for name in ("files", "folders")
        ]
        return cls(*kinds)

    def hold(self) -> bool:
        """Return True if nothing changed. A file is read only if its state differs."""
        return all(
            _state(path) == state or read(path) == digest
            for known, read in ((self.folders, _names), (self.files, _digest))
            for path, (state, digest) in known.items()
        )


@dataclass(frozen=True, slots=True)
class PreprocessedText:
    """Output of the preprocessor.

    Attributes:
        text: The text that the compiler reads.
        dependencies: Its dependencies; None if they changed while it was made.
    """

    text: str
    dependencies: Dependencies | None

    def digest(self, home: str = "") -> str:
        """Return a digest of the text.

        Args:
            home: Folder, ending in a slash, that is ignored in line markers. In string literals it counts.
        """
        text = _placeless(home, self.text, _MARKED)
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def preprocess(toolchain: Toolchain, flags: Sequence[str], files: Mapping[str, str]) -> PreprocessedText:
    """Run the preprocessor until two runs see the same files, so that the second run read them as recorded.

    Args:
        toolchain: The compiler.
        flags: Its flags.
        files: Texts by name: `SOURCE`, and headers in the same folder.

    Raises:
        PreprocessorError: If the preprocessor refuses the text.
        ToolchainError: If the compiler does not run.
        OSError: If nothing can be written.
    """
    searched = _searched(toolchain, flags)
    before: Dependencies | None = None
    with tempfile.TemporaryDirectory(prefix="opsmith-") as scratch:
        directory = Path(scratch)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
        for _ in range(ATTEMPTS):
            done = toolchain.run([*flags, "-E", SOURCE, "-o", PREPROCESSED], directory)
            if done.status:
                raise PreprocessorError(done.printed)
            text = (directory / PREPROCESSED).read_text(encoding="utf-8", errors="surrogateescape")
            text = _FOLDER_MARKER.sub("", text)  # it contains the path of the temporary directory
            seen = _dependencies(text, files[SOURCE], searched)
            if seen == before:
                return PreprocessedText(text, seen)
            before = seen
    return PreprocessedText(text, None)


def obtain_with_dependencies(
    cache: Cache,
    parts: Mapping[str, str],
    preprocessed: Callable[[], PreprocessedText],
    build: Build,
    home: str = "",
) -> tuple[CacheEntry, Dependencies | None]:
    """Return the entry for a text with its headers, from the cache or compiled now, and its dependencies.

    The dependencies are None if they changed while the text was made.

    Args:
        cache: The cache.
        parts: Everything that the entry depends on, without headers.
        preprocessed: Function that runs the preprocessor. build: Function that compiles the file
            `PREPROCESSED` in a directory. Its exceptions are raised.
        home: Folder, ending in a slash, that does not appear in the built files: a copy in a different folder
            has the same entry.

    Raises:
        CompileError: If the compiler refuses the text. The process remembers the error. CacheError: See
            `Cache.obtain`.
    """
    key = key_of(parts)
    placeless = {name: _placeless(home, text, _BEGINNING) for name, text in parts.items()}
    known = _remembered(cache, key)
    digest = next((digest for digest, dependencies in known.items() if dependencies.hold()), None)
    made: PreprocessedText | None = None

    def fill(directory: Path) -> None:
        nonlocal made
        made = made or preprocessed()
        if made.digest(home) != digest:
            raise _OtherTextError
        if (key, digest) in _refused:
            raise _refused[key, digest].with_traceback(None)
        path = directory / PREPROCESSED
        path.write_text(made.text, encoding="utf-8", errors="surrogateescape")
        try:
            build(directory)
        except errors.CompileError as error:
            _refused[key, digest] = error
            raise
        path.unlink()

    if digest is not None:
        with suppress(_OtherTextError):  # a header was saved just now, or the stored dependencies are wrong
            return cache.obtain({**placeless, "preprocessed": digest}, fill), known[digest]
    made = made or preprocessed()
    digest = made.digest(home)
    entry = cache.obtain({**placeless, "preprocessed": digest}, fill)
    if made.dependencies is not None:
        known.pop(digest, None)  # the text is the same, for example after a change of a comment
        _remember(cache, key, {digest: made.dependencies, **known})
    return entry, made.dependencies


def _placeless(home: str, text: str, before: str) -> str:
    """Remove a folder from the beginnings of paths in a text.

    Args:
        home: The folder; empty to keep all.
        text: The text.
        before: Pattern of the text before a path.
    """
    if not home:
        return text
    # A null character, which no source contains, replaces the folder, so that different texts stay different.
    return re.sub(f"({before}){re.escape(home)}", "\\1\0", text, flags=re.MULTILINE)


def own_headers(text: str) -> list[str]:
    """Return the headers in a preprocessed text, except the system's headers."""
    return [name for name, is_system in _headers(text).items() if not is_system]


def _headers(text: str) -> dict[str, bool]:
    """Return the absolute paths of headers in a preprocessed text, each with True if it is the system's."""
    entered = ((_unquoted(name), flags.split()) for name, flags in _ENTERED.findall(text))
    return {name: _SYSTEM_HEADER in flags for name, flags in entered if os.path.isabs(name)}


def _dependencies(text: str, source: str, searched: Sequence[str]) -> Dependencies:
    files, own = _headers(text), own_headers(text)
    starts = [*searched, *map(os.path.dirname, own)]
    beside = {
        os.path.dirname(os.path.relpath(name, start))
        for name in files
        for start in starts
        if _below(name, start)
    }
    for each in (source, *map(_text, own)):
        beside |= {os.path.dirname(name) for name in named_files(each)}  # a condition may test if they exist
    folders = {os.path.normpath(os.path.join(start, each)) for start in starts for each in ("", *beside)}
    return Dependencies.now(files, sorted(folders))


@functools.cache
def system_folders(toolchain: Toolchain, flags: tuple[str, ...], variables: str) -> tuple[str, ...]:
    """Return the folders of the system's headers.

    Args:
        toolchain: The compiler.
        flags: Its flags, without folders of headers.
        variables: See `compiler_variables`.
    """
    searched = _searched(toolchain, flags)
    return tuple(dict.fromkeys([*map(os.path.normpath, searched), *map(os.path.realpath, searched)]))


def _searched(toolchain: Toolchain, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the folders in which a compiler searches headers, including folders that do not exist."""
    with tempfile.TemporaryDirectory(prefix="opsmith-") as scratch:
        printed = toolchain.run(
            [*flags, "-v", "-E", "-x", "c++", os.devnull, "-o", os.devnull], Path(scratch)
        ).printed
    listed = printed.partition('#include "..." search starts here:')[2].partition("End of search list")[0]
    return tuple(dict.fromkeys([*_SEARCHED.findall(listed), *_MISSING.findall(printed)]))


def _index(cache: Cache, key: str) -> Path:
    return cache.directory / INDEX / f"{key}.json"


def _remembered(cache: Cache, key: str) -> dict[str, Dependencies]:
    """Return the stored dependencies of a source, by the digest of its text, the newest first."""
    try:
        held = json.loads(_index(cache, key).read_text(encoding="utf-8"))
        return {str(digest): Dependencies.read(each) for digest, each in held.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # missing or damaged
        return {}


def _remember(cache: Cache, key: str, known: Mapping[str, Dependencies]) -> None:
    """Store the dependencies of a source's texts; a failure to write is ignored."""
    path = _index(cache, key)
    newest = dict(itertools.islice(known.items(), REMEMBERED))
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        written = path.with_name(f".{key}-{os.getpid()}-{threading.get_ident()}")
        written.write_text(json.dumps({digest: asdict(each) for digest, each in newest.items()}))
        written.replace(path)


def _state(path: str) -> State:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _names(path: str) -> str:
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return ""
    return hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _unquoted(name: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], name)


def _below(name: str, start: str) -> bool:
    return os.path.commonpath([name, start]) == os.path.normpath(start)
