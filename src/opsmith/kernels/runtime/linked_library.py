"""Libraries of several linked kernels for programs without Python, from the cache or linked now."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsmith.build.cache import CacheEntry, cache_on_disk
from opsmith.build.toolchain import Toolchain
from opsmith.kernels.cpp.compiler import HEADER, build_parts, kernel_toolchain

OBJECT, TABLES = "kernel.o", "tables.cpp"
IMAGES = "images.bin"
"""File of all GPU images, which the assembler includes in the library."""
ALIGNMENT = 16
"""Alignment of images for GPUs."""

ANY_PROCESSOR = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pipe")
_LINKING = ("-shared", "-fPIC", "-pthread", "-Wl,-s", "-Wl,--version-script=exported")
_LINKING_KERNELS = ("-fopenmp",)
LINKING = "a compiler of C++17 with GNU's linker, such as g++ 9 with binutils 2.29"


@dataclass(frozen=True, slots=True)
class KernelObject:
    """Compiled kernel that can be linked into a library.

    Attributes:
        table: Name of the table of the kernel's instances.
        path: Object file.
        linking: Linker arguments of the kernel's author.
    """

    table: str
    path: Path
    linking: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """Compiled kernel for a GPU that a library can contain.

    Attributes:
        numbers: Its rules and instances, in the format of `LaunchedKernel` in launched_kernel.h.
        images: Its images, one after the other, each aligned to `ALIGNMENT` bytes.
    """

    numbers: tuple[int, ...]
    images: bytes


@dataclass(frozen=True, slots=True)
class LinkedLibrary:
    """Kind of library that consists of kernels, tables of these kernels, and common code.

    Attributes:
        program: Name of the program that loads it, for messages, such as `torch`.
        name: Name of the file.
        source: The common code.
        headers: Headers of the common code and of the tables.
        exported: Linker script that names the exported symbols.
        linking: More flags of the linker.
        stubs: Names of needed libraries, which are replaced by empty libraries during linking.
    """

    program: str
    name: str
    source: Path
    headers: tuple[Path, ...]
    exported: str
    linking: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()

    def _compiled(self, toolchain: Toolchain) -> Path:
        """Compile the common code, once on a machine, for the baseline processor."""

        def build(directory: Path) -> None:
            self._copy(directory, self.source)
            self._make(toolchain, [*ANY_PROCESSOR, "-c", self.source.name], directory, OBJECT)

        parts = {
            "kind": f"library part for {self.program}",
            "text": _texts((self.source, *self.headers)),
            **build_parts(toolchain, ANY_PROCESSOR),
        }
        return cache_on_disk().obtain(parts, build).directory / OBJECT

    def link(
        self,
        operators: Iterable[str],
        kernels: Sequence[KernelObject],
        tables: str,
        compiling: Sequence[str],
        images: bytes = b"",
    ) -> CacheEntry:
        """Link kernels into a library.

        Args:
            operators: Names of the operators, for the list of the cache.
            kernels: The kernels.
            tables: Text of the tables, in C++.
            compiling: Flags of the compiler for the tables.
            images: Content of the file `IMAGES`, which the tables may include.

            Returns:
                Entry whose directory contains the library.

            Raises:
                ToolchainError: If there is no compiler, or linking fails.
        """
        toolchain = kernel_toolchain()
        compiled = self._compiled(toolchain)
        flags = [*_LINKING, *(_LINKING_KERNELS if kernels else ()), *self.linking]
        given = [word for linking in dict.fromkeys(each.linking for each in kernels) for word in linking]

        def build(directory: Path) -> None:
            self._copy(directory)
            (directory / "exported").write_text(self.exported, encoding="utf-8")
            (directory / TABLES).write_text(tables, encoding="utf-8")
            (directory / IMAGES).write_bytes(images)
            (directory / "empty.cpp").write_text("", encoding="utf-8")
            for stub in self.stubs:
                self._make(
                    toolchain, ["-shared", "-fPIC", f"-Wl,-soname,{stub}", "empty.cpp"], directory, stub
                )
            self._make(toolchain, [*compiling, "-c", TABLES], directory, "tables.o")
            objects = ["tables.o", str(compiled), *(str(each.path) for each in kernels)]
            self._make(toolchain, [*flags, *objects, *given, *self.stubs, "-ldl"], directory, self.name)

        parts = {
            "kind": f"library for {self.program}",
            "operator": ", ".join(operators),
            "text": tables,
            "glue": _texts(self.headers),
            "objects": " ".join(each.parent.name for each in (compiled, *(one.path for one in kernels))),
            "files": hashlib.sha256(images).hexdigest(),
            **build_parts(toolchain, [*compiling, *flags, *given]),
        }
        return cache_on_disk().obtain(parts, build)

    def _copy(self, directory: Path, *more: Path) -> None:
        for path in (HEADER, *self.headers, *more):
            (directory / path.name).write_bytes(path.read_bytes())

    def _make(self, toolchain: Toolchain, arguments: Sequence[str], directory: Path, output: str) -> None:
        toolchain.build(f"a library for {self.program}", [*arguments, "-o", output], directory, LINKING)


def table_file(header: str, kernels: Iterable[KernelObject], lines: Iterable[str], last: str) -> str:
    """Return the C++ file of a library's tables.

    Args:
        header: Header that it includes.
        kernels: Kernels that are linked.
        lines: Tables that only this file uses.
        last: The definition of the table that the common code reads.
    """
    tables = [f"extern opsmith::Exported {kernel.table};" for kernel in kernels]
    includes = [f'#include "{header}"', '#include "processor.h"']
    return "\n".join(
        [*includes, 'extern "C" {', *tables, "}", "namespace {", *lines, "}  // namespace", last, ""]
    )


def require_compiler() -> None:
    """Search the compiler of libraries.

    Raises:
        ToolchainError: If there is no compiler.
    """
    kernel_toolchain()


def _texts(files: Iterable[Path]) -> str:
    return "\0".join(path.read_text(encoding="utf-8") for path in files)
