"""Interface with which a language builds kernels into a package before their first call (`opsmith build`)."""

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
        described: Description of the kernel for the manifest.
        content: Content of the kernel's file.
        suffix: Suffix of the file's name.
    """

    described: BuiltFile
    content: bytes
    suffix: str


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """Library of opsmith that kernels need.

    Attributes:
        target: Target of the library.
        build: Function that builds the library.
    """

    target: str
    build: Callable[[], Built]


@dataclass(frozen=True, slots=True)
class LinkedKernel:
    """Kernel that a library without Python can contain.

    Attributes:
        arguments: Parameters for the arguments of the operator.
        build: Function that compiles the kernel for the library.
        unsized: Reason why C++ cannot compute the sizes of the results; empty if it can.
    """

    arguments: tuple[Parameter, ...]
    build: Callable[[], KernelObject | LaunchedKernel]
    unsized: str = ""


class Ahead(GuardedPart, ABC):
    """Builds kernels of one language into packages.

    If a CPU kernel runs from a package, its `BuiltKernel.origin_of` must return `built into the package for`
    and the target: `opsmith build --verify` reads it to verify that the built kernels ran the samples.
    """

    @abstractmethod
    def refuse(self, kernels: Sequence[Any], targets: Sequence[str]) -> None:
        """Refuse kernels and targets that cannot be built, before anything is built.

        Args:
            kernels: Kernels of the language.
            targets: Targets: levels of processors, such as `x86-64-v3`, or architectures of GPUs, such as
                `sm_90`, and `compute_90` for code that later GPUs can run.

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
            folder: Folder in the package for the built kernels.

        Raises:
            CompileError, ToolchainError, MissingSamplesError: If the kernel cannot be built.
            UsageError: If the built kernel depends on this machine.
        """

    def linked(self, kernel: Any, targets: Sequence[str]) -> LinkedKernel | str:
        """Return a kernel for a library without Python, or why no library can contain it.

        Args:
            kernel: The kernel.
            targets: Targets, as in `refuse`; for the CPU, one level or `native`.

        Raises:
            KernelSignatureError: If kernels of libraries cannot take an argument or return a result.
        """
        return f"its kernel at {kernel.where} is in {kernel.language}"

    def origin(self, kernel: Any) -> str:
        """Return the origin of a kernel on this machine, in words; a C++ kernel is loaded or built for this.

        Raises:
            CompileError, KernelSignatureError, ToolchainError: If the reference runs instead of the kernel.
        """
        return FIRST_CALL

    def shared(self) -> Iterator[tuple[SharedLibrary, bool]]:
        """Yield each library of opsmith that the kernels need; True if every build must contain it."""
        yield from ()


def shipped_headers(kernel: BuiltKernel[Any], package: Path, headers: Mapping[str, str]) -> dict[str, str]:
    """Return a package's headers that a kernel includes; a built kernel is used only if they are unchanged.

    Headers of installed packages belong to the building machine, like the compiler's own headers.

    Args:
        kernel: The kernel.
        package: Folder of the package.
        headers: Digest of each header that is not the compiler's, by its absolute path.

    Returns:
        Digest of each header by its path in the package.

    Raises:
        UsageError: If a header is elsewhere, where opsmith could not notice an edit of it.
    """
    found, root = {}, package.resolve()
    for name, digest in headers.items():
        path = Path(name).parent.resolve() / Path(name).name  # in a wheel, a link is a file
        if path.is_relative_to(root):
            found[path.relative_to(root).as_posix()] = digest
        elif not any(path.is_relative_to(each) for each in _installed()):
            raise kernel.error(
                errors.UsageError,
                f"a header of its kernel in {kernel.language} lies outside of the package",
                argument="include_dirs",
                expected=f"headers in {root}, or installed headers",
                got=str(path),
                hint="copy the header into the package, because users need it and opsmith must notice its "
                "edits",
            )
    return dict(sorted(found.items()))


def _installed() -> list[Path]:
    """Return the folders of the packages that are installed for this Python."""
    named = [sysconfig.get_path(name) for name in ("purelib", "platlib", "include", "platinclude")]
    return [Path(each).resolve() for each in (*named, f"{sys.prefix}/include", site.getusersitepackages())]
