"""Search the package that declares an operator for a built kernel that fits.

`opsmith build` writes kernels to the folder `_kernels` of a package. A built kernel is used only if the
source is still the same, the processor or GPU can run it, and the file is unchanged. A file that cannot be
used never stops a call: the cache, a compiler or the reference is used instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opsmith.build.manifest import BuiltFile, KernelFolder, UnusableError, kernel_folder
from opsmith.core.caller_warning import warn_caller

FOLDER = "_kernels"


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search.

    Attributes:
        folder: The folder; None if the package has no built kernels.
        files: Files that fit, the best first.
        misfits: Reason why the remaining files do not fit; empty if there are none. rejected: Files that fit,
            but cannot be used, each with its reason.
    """

    folder: KernelFolder | None = None
    files: tuple[BuiltFile, ...] = ()
    misfits: str = ""
    rejected: dict[Path, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Reason why no file is used, faults of files first; empty if the package has no built kernels."""
        faults = [f"{path} is not used: {reason}" for path, reason in self.rejected.items()]
        return "; ".join(filter(None, [*faults, self.misfits]))

    def usable(self) -> Iterator[tuple[BuiltFile, Path, bytes]]:
        """Yield the files that are unchanged since the build, with path and content; reject the rest."""
        for built in self.files:
            assert self.folder is not None
            try:
                content = self.folder.content(built)
            except UnusableError as error:
                self.reject(error.path, error.reason)
                continue
            yield built, self.folder.directory / built.file, content

    def reject(self, path: Path, reason: str) -> None:
        """Record that a file cannot be used, and warn once for each file."""
        self.rejected[path] = reason
        warn_unusable(path, reason)


@dataclass(frozen=True, slots=True)
class _Search:
    """Settings of the search in a context.

    Attributes:
        instead: Folders that replace the package's folder, by package. targets: The only targets that are
            used; None for all.
    """

    instead: Mapping[Path, Path] = field(default_factory=dict)
    targets: Collection[str] | None = None


_search: ContextVar[_Search | None] = ContextVar("packaged_search", default=None)


@contextmanager
def looking_in(package: Path, directory: Path, targets: Collection[str]) -> Iterator[None]:
    """Context manager in which the kernels of a package are taken from a different folder, to try them.

    Args:
        package: Folder of the package.
        directory: Folder with built kernels.
        targets: The only targets that are used.
    """
    token = _search.set(_Search({package: directory}, targets))
    try:
        yield
    finally:
        _search.reset(token)


@contextmanager
def nothing_packaged() -> Iterator[None]:
    """Context manager in which no built kernels of packages are used."""
    token = _search.set(_Search(targets=()))
    try:
        yield
    finally:
        _search.reset(token)


def package_of(file: str | None) -> Path | None:
    """Return the folder of the outermost package that a Python file belongs to; None if there is none.

    Args:
        file: Path of the file.
    """
    if file is None or not os.path.isfile(file):  # such as `<stdin>`, which has no folder
        return None
    folder = Path(file).resolve().parent
    if not (folder / "__init__.py").is_file():
        return None
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder


def search(
    package: Path | None,
    language: str,
    operator: str,
    digest: Callable[[], str],
    abi: int,
    misfit: Callable[[BuiltFile], str | None] = lambda built: built.misfit,
    rank: Callable[[BuiltFile], Any] = lambda built: -len(built.features),
) -> Found:
    """Search the built kernels of a package for the kernels of a source.

    Args:
        package: Folder of the package that declares the kernel; see `package_of`.
        language: Language of the kernel.
        operator: Name of the operator.
        digest: Function that returns the digest of the author's declaration; called only if the package has
            such a kernel. abi: Version of the structures that this opsmith accepts. misfit: Function that
            returns why a file does not fit here; None if it fits. rank: Function that returns the sort key of
            a file that fits; the best file has the smallest.
    """
    where = _search.get() or _Search()
    if package is None or where.targets == ():
        return Found()
    directory = where.instead.get(package, package / FOLDER)
    try:
        folder = kernel_folder(directory, package / "__init__.py")
    except UnusableError as error:
        found = Found()
        found.reject(error.path, error.reason)
        return found
    if folder is None:
        return Found()
    named = [
        each
        for each in folder.files
        if (each.language, each.operator) == (language, operator)
        and (where.targets is None or each.target in where.targets)
    ]
    if not named:
        return Found(folder, misfits=f"{directory} has no built kernel of the operator in {language}")
    faults = [each.fault_of_part(package) for each in named]
    sound = [each for each, fault in zip(named, faults, strict=True) if fault is None]
    if not sound:
        return Found(folder, misfits=f"{faults[0]}, for the kernels in {directory}")
    wanted = digest()
    same = [each for each in sound if each.digest == wanted]
    if not same:
        reason = (
            "the source or its declaration (dtypes, flags, shapes or signature) has changed since the build"
        )
        return Found(folder, misfits=f"{reason} in {directory}")
    fresh = [each for each in same if each.abi == abi]
    if not fresh:
        reason = f"built for version {same[0].abi} of opsmith's kernels, but this opsmith has {abi}"
        warn_unusable(directory / same[0].file, reason)
        return Found(folder, misfits=f"the files in {directory} are {reason}")
    misfits = [misfit(each) for each in fresh]
    fitting = [each for each, reason in zip(fresh, misfits, strict=True) if reason is None]
    reasons = "; ".join(dict.fromkeys(each for each in misfits if each is not None))
    return Found(folder, tuple(sorted(fitting, key=rank)), reasons)


def packaged_in(package: Path | None) -> tuple[BuiltFile, ...]:
    """Return the built kernels of a package; empty if it has none, or they cannot be used."""
    if package is None:
        return ()
    try:
        folder = kernel_folder(package / FOLDER, package / "__init__.py")
    except UnusableError as error:
        warn_unusable(error.path, error.reason)
        return ()
    return () if folder is None else folder.files


_warned: set[Path] = set()


def warn_unusable(path: Path, reason: str) -> None:
    """Warn, once for each file, that a built kernel of a package is not used."""
    if path not in _warned:
        is_kernel = path.suffix in (".so", ".images")
        named = f"the built kernel {path} is" if is_kernel else f"the built kernels of {path} are"
        warn_caller(
            f"{named} not used: {reason}; install the package again, or build it again with `opsmith build`"
        )
        _warned.add(path)  # this is last, because a filter may turn the warning into an exception
