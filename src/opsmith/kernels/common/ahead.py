"""Kernels built into a package before anybody calls them: what a language gives, for `opsmith build`."""

from __future__ import annotations

import site
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.build.manifest import BuiltFile
from opsmith.core.guarded_part import GuardedPart
from opsmith.core.kernels import BuiltKernel
from opsmith.kernels.common.parameters import Parameter
from opsmith.kernels.runtime.linked_library import KernelObject, LaunchedKernel

FIRST_CALL = "compiled when it is first called"
"""Origin of a kernel that no package has built."""


@dataclass(frozen=True, slots=True)
class Built:
    """Built kernel, before it is written into a folder.

    Attributes:
        described: Its description for the manifest.
        content: Content of its file.
        suffix: Suffix of the file's name.
    """

    described: BuiltFile
    content: bytes
    suffix: str


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """Library of opsmith's own that kernels need.

    Attributes:
        target: Its target.
        build: Function that builds it.
    """

    target: str
    build: Callable[[], Built]


@dataclass(frozen=True, slots=True)
class LinkedKernel:
    """Kernel that a library without Python can have.

    Attributes:
        arguments: Parameters for the arguments of its operator.
        build: Compiles it for the library.
        unsized: Why C++ does not know the sizes of its results; empty if it does.
    """

    arguments: tuple[Parameter, ...]
    build: Callable[[], KernelObject | LaunchedKernel]
    unsized: str = ""


class Ahead(GuardedPart, ABC):
    """Builds kernels of one language into packages.

    For the CPU, `BuiltKernel.origin_of` of a kernel that runs from a package returns `built into the package
    for` and the target: `opsmith build --verify` asks if the samples were run by what was built.
    """

    @abstractmethod
    def refuse(self, kernels: Sequence[Any], targets: Sequence[str]) -> None:
        """Refuse what cannot be built for some targets, before anything is built.

        Args:
            kernels: Kernels of the language.
            targets: Targets: levels of processors, as `x86-64-v3`; architectures of GPUs, as `sm_90`, and
                `compute_90` for code that later GPUs run.

        Raises:
            UsageError: If a kernel has options that a package cannot have.
            ToolchainError: If a compiler is missing, or does not know a target.
        """

    @abstractmethod
    def build(self, kernel: Any, target: str, root: Path, folder: Path) -> Built:
        """Build a kernel for a target.

        Args:
            kernel: The kernel.
            target: The target.
            root: Folder of the package.
            folder: Folder in it that the built kernels lie in.

        Raises:
            CompileError, ToolchainError, MissingSamplesError: If it cannot be built.
            UsageError: If it depends on this machine.
        """

    def linked(self, kernel: Any, targets: Sequence[str]) -> LinkedKernel | str:
        """Return a kernel for a library without Python, or why no library can have it.

        Args:
            kernel: The kernel.
            targets: Targets, as of `refuse`; for the CPU one, or `native`.

        Raises:
            KernelSignatureError: If no kernel of a library takes an argument, or returns a result.
        """
        return f"its kernel at {kernel.where} is in {kernel.language}"

    def origin(self, kernel: Any) -> str:
        """Return words for where a kernel comes from on this machine; one in C++ is loaded, or built.

        Raises:
            CompileError, KernelSignatureError, ToolchainError: If the reference runs in its place.
        """
        return FIRST_CALL

    def shared(self) -> Iterator[tuple[SharedLibrary, bool]]:
        """Yield each library of opsmith's own that the kernels need; True if no build is without it."""
        yield from ()


def shipped_headers(kernel: BuiltKernel[Any], package: Path, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a package that a kernel includes, which decide whether it is used once built.

    Those of installed packages are, as the compiler's own, part of the machine that builds.

    Args:
        kernel: The kernel.
        package: Folder of the package.
        headers: Digest of each header that is not the compiler's, by its absolute path.

    Returns:
        Digest of each header by its path in the package.

    Raises:
        UsageError: If a header lies elsewhere: nobody would see that it was edited.
    """
    found, root = {}, package.resolve()
    for name, digest in headers.items():
        path = Path(name).parent.resolve() / Path(name).name  # a link in the package is a file in a wheel
        if path.is_relative_to(root):
            found[path.relative_to(root).as_posix()] = digest
        elif not any(path.is_relative_to(each) for each in _installed()):
            raise kernel.error(
                errors.UsageError,
                f"a header of its kernel in {kernel.language} lies outside of the package",
                argument="include_dirs",
                expected=f"headers in {root}, or installed ones",
                got=str(path),
                hint="copy it into the package: an edit of it would go unseen, and users would not have it",
            )
    return dict(sorted(found.items()))


def _installed() -> list[Path]:
    """Return the folders of what is installed for this Python."""
    named = [sysconfig.get_path(name) for name in ("purelib", "platlib", "include", "platinclude")]
    return [Path(each).resolve() for each in (*named, f"{sys.prefix}/include", site.getusersitepackages())]
