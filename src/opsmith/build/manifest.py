"""Manifest of built kernels: source and target of each file, and digests that detect a changed file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opsmith.build.cache import MANIFEST, OTHERS, content_of, digest_of, flush
from opsmith.build.processor import cpu_features, machine

VERSION = 2
"""Version of the manifest."""
RUNTIME = "runtime"
"""Language of opsmith's own library, which connects torch with kernels in C++ and CUDA C++."""

BUILT_FILES = f"*.{'[0-9a-f]' * 16}.*"
"""Names of files with built kernels, as a shell pattern."""
_NAME = re.compile(r"\w[\w.+-]*")


class UnusableError(Exception):
    """A manifest or a file that it names cannot be used.

    Attributes:
        path: The file.
        reason: The reason.
    """

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltFile:
    """File with a built kernel.

    Attributes:
        operator: Name of the operator; empty for opsmith's own library.
        language: Language of the kernel, or `RUNTIME`.
        digest: Digest of the author's text and options; see `digest_of_parts`.
        abi: Version of the structures between the kernel and opsmith.
        target: Target of the build: `x86-64-v3`, `sm_90`, or `compute_90` for PTX. machine: Machine that it
            runs on, such as `linux-x86_64`; empty for code of a GPU.
        features: Features that the processor must have.
        headers: Digests of the headers that it includes from the package, by path in the package. linked:
            Digests of the libraries that it was linked with from the package, by path in the package.
            libraries: Further libraries that the author names, which must be installed.
        file: Name of the file, in the folder of the manifest.
        sha256: Digest of its content.
        bytes: Its size.
        instances: For code of a GPU, data of each instance, by its name.
    """

    operator: str
    language: str
    digest: str
    abi: int
    target: str
    machine: str = ""
    features: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    linked: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    file: str = ""
    sha256: str = ""
    bytes: int = 0
    instances: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, held: Mapping[str, Any]) -> BuiltFile:
        """Return a file from its JSON form.

        Raises:
            ValueError, KeyError, TypeError: If the form is wrong, or the name points outside of the folder.
        """
        texts = {name: str(held[name]) for name in ("operator", "language", "digest", "target", "machine")}
        name = str(held["file"])
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"`{name}` is not the name of a file in this folder")
        headers, linked = (
            {str(path): str(digest) for path, digest in held[name].items()} for name in ("headers", "linked")
        )
        for path in (*headers, *linked):
            if path.startswith("/") or {"", "..", "."} & {*path.split("/")}:
                raise ValueError(f"`{path}` is not the path of a file in this package")
        return cls(
            **texts,
            abi=int(held["abi"]),
            features=tuple(map(str, held["features"])),
            headers=headers,
            linked=linked,
            libraries=tuple(map(str, held["libraries"])),
            file=name,
            sha256=str(held["sha256"]),
            bytes=int(held["bytes"]),
            instances={str(key): {**each} for key, each in held["instances"].items()},
        )

    @property
    def misfit(self) -> str | None:
        """Return the reason why this processor cannot run it; None if it can."""
        if self.machine and self.machine != machine():
            return f"`{self.file}` is for {self.machine}, but this is {machine()}"
        missing = [each for each in self.features if each not in cpu_features()]
        return f"{self.target} needs {', '.join(missing)}, which this processor lacks" if missing else None

    def fault_of_part(self, package: Path) -> str | None:
        """Return the header or library of the package that has changed since the build, or None.

        Args:
            package: Folder of the package.
        """
        for kind, parts in (("header", self.headers), ("library", self.linked)):
            for path, digest in parts.items():
                try:
                    found = hashlib.sha256((package / path).read_bytes()).hexdigest()
                except (OSError, ValueError):
                    return f"the {kind} {path} is missing"
                if found != digest:
                    return f"the {kind} {path} has changed since the build"
        return None


@dataclass(frozen=True, slots=True)
class KernelFolder:
    """Folder of built kernels.

    Attributes:
        directory: The folder.
        files: The files that its manifest names.
        opsmith: Version of opsmith that built them.
        beside: Owner, group and mode of the package's `__init__.py`: no file here may be writable for more
            users.
    """

    directory: Path
    files: tuple[BuiltFile, ...]
    opsmith: str
    beside: os.stat_result

    def content(self, built: BuiltFile) -> bytes:
        """Return the content of a file, if it is unchanged since the build.

        Raises:
            UnusableError: If it has changed, or users without access to the package could have changed it.
        """
        path = self.directory / built.file
        refuse_open(path, self.beside)
        try:
            content = content_of(path)
        except (OSError, ValueError) as error:
            raise UnusableError(path, str(error)) from None
        if hashlib.sha256(content).hexdigest() != built.sha256:
            size = f"it has {len(content)} of {built.bytes} bytes"
            changed = "its content has changed since the build"
            raise UnusableError(path, changed if len(content) == built.bytes else size)
        return content


_folders: dict[tuple[Path, int, int], KernelFolder] = {}
"""Loaded folders by path, inode and time of the manifest."""


def kernel_folder(directory: Path, beside: Path) -> KernelFolder | None:
    """Return a folder of built kernels; None if there is none.

    Args:
        directory: The folder.
        beside: The package's `__init__.py`.

    Raises:
        UnusableError: If other users can write into it, or its manifest is damaged, missing or of a different
            version.
    """
    manifest = directory / MANIFEST
    try:
        state = manifest.lstat()
        trusted = beside.stat()
    except OSError:
        if any(directory.glob(BUILT_FILES)):
            raise UnusableError(manifest, "it is missing") from None
        return None
    key = directory, state.st_ino, state.st_mtime_ns
    if key not in _folders:
        for path in (directory, manifest):
            refuse_open(path, trusted)
        try:
            held = json.loads(content_of(manifest))
            version = held["version"]
            if version == VERSION:
                files, builder = tuple(map(BuiltFile.read, held["files"])), str(held["opsmith"])
        except KeyError as error:
            raise UnusableError(manifest, f"it is damaged: it lacks {error}") from None
        except (TypeError, AttributeError, RecursionError):
            raise UnusableError(manifest, "it is damaged: it is not a manifest") from None
        except (OSError, ValueError) as error:
            raise UnusableError(manifest, f"it is damaged: {error}") from None
        if version != VERSION:
            raise UnusableError(manifest, f"it has version {version}, but this opsmith reads {VERSION}")
        _folders[key] = KernelFolder(directory, files, builder, trusted)
    return _folders[key]


def refuse_open(path: Path, beside: os.stat_result) -> None:
    """Raise an error for a link, and for a file or folder that more users can change than the package.

    Args:
        path: The file or folder.
        beside: State of the package's `__init__.py`.

    Raises:
        UnusableError: If it is a link, or more users can change it.
    """
    try:
        state = path.lstat()
        root = Path(os.sep).lstat().st_uid
    except OSError as error:
        raise UnusableError(path, error.strerror or str(error)) from None
    if stat.S_ISLNK(state.st_mode):
        raise UnusableError(path, "it is a link")
    if os.name == "nt":  # it has no permission bits
        return
    if state.st_uid not in (os.geteuid(), 0, root, beside.st_uid):
        raise UnusableError(path, f"it belongs to user {state.st_uid}, but the package to {beside.st_uid}")
    shared = stat.S_IWGRP if state.st_gid == beside.st_gid else 0  # the group bits of a umask of 002
    if state.st_mode & OTHERS & ~(beside.st_mode & shared):
        mode = stat.S_IMODE(state.st_mode)
        raise UnusableError(path, f"its mode is {mode:o}, so others can write into it")


def digest_of_parts(parts: Mapping[str, Any]) -> str:
    """Return the digest of an author's declaration: text, headers, dtypes, options and so on, by name.

    Example:
        >>> digest_of_parts({"text": "a"}) == digest_of_parts({"text": "b"})
        False
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def sealed(directory: Path, built: BuiltFile) -> BuiltFile:
    """Return a file with digest and size of its content; it is flushed, and only the owner can write it."""
    path = directory / built.file
    _close(path, 0o644)
    held = {**asdict(built), "sha256": digest_of(path), "bytes": path.stat().st_size}
    return BuiltFile.read(held)


def write_manifest(directory: Path, files: Sequence[BuiltFile], opsmith: str) -> None:
    """Write the manifest of the files in a folder.

    Args:
        directory: The folder.
        files: Its files; see `sealed`.
        opsmith: Version of opsmith.
    """
    held = {"version": VERSION, "opsmith": opsmith, "files": [asdict(each) for each in files]}
    path = directory / MANIFEST
    path.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    _close(path, 0o644)
    directory.chmod(0o755)
    flush(directory)


def _close(path: Path, mode: int) -> None:
    path.chmod(mode)
    flush(path)
