"""Kernels in C++, built into a package for levels of processors."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from opsmith import errors
from opsmith.build.elf import NEEDED, RPATH, RUNPATH, dynamic_texts
from opsmith.build.manifest import BuiltFile
from opsmith.build.processor import levels, machine
from opsmith.build.toolchain import FLAGS
from opsmith.kernels.common.ahead import Ahead, Built, LinkedKernel, SharedLibrary, shipped_headers
from opsmith.kernels.common.parameters import cpp_arguments
from opsmith.kernels.cpp.compiler import building_with, kernel_toolchain
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cpp.library import VERSION
from opsmith.kernels.runtime.ahead import RUNTIME
from opsmith.kernels.runtime.loading import LIBRARY


class CppAhead(Ahead):
    """Builds libraries that need no compiler on the machine that uses them."""

    def refuse(self, kernels: Sequence[CppKernel], targets: Sequence[str]) -> None:
        """Refuse flags for instructions outside of a level, and levels that the compiler does not know."""
        for kernel in kernels:
            _refuse_instructions(kernel)
        refuse_unknown_levels([level for level in levels() if level in targets])

    def build(self, kernel: CppKernel, target: str, root: Path, folder: Path) -> Built:
        """Build a kernel for a level of processors, without debug information and paths."""
        kept = [flag for flag in FLAGS if not flag.startswith(("-march", "-g"))]
        last = (f"-march={target}", "-g0", "-Wl,-s")
        with building_with(kept, last, home=folder):
            entry, headers = kernel.compile_with_headers()
        content = (entry.directory / LIBRARY).read_bytes()
        refuse_folders(kernel, content)
        described = BuiltFile(
            operator=kernel.operator.name,
            language=kernel.language,
            digest=kernel.digest(),
            abi=VERSION,
            target=target,
            machine=machine(),
            features=levels()[target],
            headers=shipped_headers(kernel, root, headers),
            linked=shipped_libraries(kernel, root, folder),
            libraries=kernel.source.options.foreign(kernel_toolchain(), folder),
        )
        return Built(described, content, "so")

    def linked(self, kernel: CppKernel, targets: Sequence[str]) -> LinkedKernel | str:
        """Return the kernel as an object to link."""
        arguments, unsized = cpp_arguments(kernel), ""
        if kernel.operator.specification.schema.results and not kernel.computes_sizes:
            unsized = (
                "only Python knows the sizes of its results: give the operator `shapes=`, "
                "or its kernel `sizes` in C++"
            )
        return LinkedKernel(arguments, partial(kernel.library_object, targets[0]), unsized)

    def origin(self, kernel: CppKernel) -> str:
        """Load or build the kernel, and return its origin in words."""
        kernel.load()
        return kernel.origin

    def shared(self) -> Iterator[tuple[SharedLibrary, bool]]:
        """Yield the library between torch and all kernels, which the kernels' compiler can always build."""
        yield RUNTIME, True


_INSTRUCTIONS = re.compile(r"-m(?!arch=|tune=|prefer-vector-width=|no-|cmodel=|llvm$).*")
"""Flags with which a compiler uses instructions outside of a level."""


def _refuse_instructions(kernel: CppKernel) -> None:
    """Refuse flags of the author with which a library would need instructions outside of its level.

    Raises:
        UsageError: If there is such a flag.
    """
    flag = next((each for each in kernel.source.options.flags if _INSTRUCTIONS.fullmatch(each)), None)
    if flag is not None:
        raise kernel.error(
            errors.UsageError,
            f"its kernel in C++ has the flag `{flag}`, which some processors of a level do not support",
            argument="flags",
            expected="only instructions of the levels that are built",
            got=flag,
            hint="leave the flag out; the level replaces `-march=` of a kernel",
        )


def refuse_unknown_levels(wanted: Sequence[str]) -> None:
    """Refuse levels of processors that the C++ compiler does not know.

    Raises:
        ToolchainError: If there is such a level, or no compiler.
    """
    toolchain = kernel_toolchain()
    with tempfile.TemporaryDirectory(prefix="opsmith-") as scratch:
        for level in wanted:
            arguments = [f"-march={level}", "-fsyntax-only", "-x", "c++", os.devnull]
            tried = toolchain.run(arguments, Path(scratch))
            if tried.status:
                raise errors.ToolchainError(
                    f"the C++ compiler does not know the processor level `{level}`",
                    expected="a compiler that takes `-march=" + level + "`, such as g++ 11 or clang 12",
                    got=" ".join(tried.printed.split()),
                    hint="name a different compiler in CXX, or levels that this compiler knows",
                )


def shipped_libraries(kernel: CppKernel, package: Path, home: Path) -> dict[str, str]:
    """Return the libraries of a package that a kernel is linked with; see `shipped_headers` for headers.

    Args:
        kernel: The kernel.
        package: Folder of the package.
        home: Folder of the package's built kernels.

    Returns:
        Digest of each library by its path in the package.
    """
    found = {}
    for path in kernel.source.options.inside(kernel_toolchain(), home):
        place = (path.parent.resolve() / path.name).relative_to(package.resolve())
        found[place.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def refuse_folders(kernel: CppKernel, content: bytes) -> None:
    """Refuse a library that names folders of this machine, from which a process would load code.

    Args:
        kernel: The kernel.
        content: Content of its library.

    Raises:
        UsageError: If the library names such a folder.
    """
    folders = [each for text in dynamic_texts(content, RPATH, RUNPATH) for each in text.split(":")]
    named = [each for each in folders if each.partition("/")[0] != "$ORIGIN"]
    named += [each for each in dynamic_texts(content, NEEDED) if "/" in each]
    if named:
        raise kernel.error(
            errors.UsageError,
            "its built kernel in C++ names a folder of this machine, from which a process would load code",
            argument="flags",
            expected="libraries in the package, or libraries that a process finds without a path",
            got=", ".join(map(repr, named)),
            hint="leave `-rpath` out of `flags=`, and unset LD_RUN_PATH",
        )
