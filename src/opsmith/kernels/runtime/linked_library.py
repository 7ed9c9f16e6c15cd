"""Libraries that several kernels are linked into, for programs that have no Python: through the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsmith.build.cache import CacheEntry, cache_on_disk, key_of
from opsmith.build.toolchain import Toolchain
from opsmith.kernels.cpp.compiler import HEADER, build_parts, kernel_toolchain

OBJECT = "kernel.o"
ALIGNMENT = 16
"""Alignment of images for GPUs."""

ANY_PROCESSOR = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pipe")
_LINKING = ("-shared", "-fPIC", "-pthread", "-Wl,-s", "-Wl,--version-script=exported")
_LINKING_KERNELS = ("-fopenmp",)
LINKING = "a compiler of C++17 with GNU's linker, as g++ 9 with binutils 2.29"


@dataclass(frozen=True, slots=True)
class KernelObject:
    """Compiled kernel that can be linked into a library.

    Attributes:
        table: Name of the table of its instances.
        path: Object file.
        linking: Arguments of the linker that its author gives.
    """

    table: str
    path: Path
    linking: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """Compiled kernel for a GPU that a library can have.

    Attributes:
        numbers: Its rules and instances, as `LaunchedKernel::read` in launched.h takes them.
        images: Its images, one after the other, each aligned to `ALIGNMENT` bytes.
    """

    numbers: tuple[int, ...]
    images: bytes


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """File of C++ that is generated for a library.

    Attributes:
        name: Its name, as `tables.cpp`.
        text: Its text.
        flags: Flags of the compiler.
        beside: Contents of files that it includes as they are, by name.
    """

    name: str
    text: str
    flags: tuple[str, ...]
    beside: Mapping[str, bytes]

    @property
    def object(self) -> str:
        """Name of the object file."""
        return Path(self.name).with_suffix(".o").name


@dataclass(frozen=True, slots=True)
class LinkedLibrary:
    """Kind of library that kernels are linked into.

    Attributes:
        program: What loads it, for messages, as `torch`.
        kind: Kind of its entries in the cache.
        part: The same for code around the kernels.
        name: Name of the file.
        headers: Headers of the code around the kernels.
        exported: Script of the linker that names what other programs see.
        linking: More flags of the linker.
        stubs: Names of libraries that it needs, which empty ones stand for while it is linked.
    """

    program: str
    kind: str
    part: str
    name: str
    headers: tuple[Path, ...]
    exported: str
    linking: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()

    def compiled(self, source: Path) -> Path:
        """Compile code around the kernels, once on a machine, for the baseline processor.

        Returns:
            The object file.

        Raises:
            ToolchainError: If there is no compiler, or it refuses the code.
        """
        toolchain = kernel_toolchain()

        def build(directory: Path) -> None:
            self._copy_headers(directory)
            (directory / source.name).write_bytes(source.read_bytes())
            self._make(toolchain, [*ANY_PROCESSOR, "-c", source.name], directory, OBJECT)

        parts = {
            "kind": self.part,
            "text": _texts((source, *self.headers)),
            **build_parts(toolchain, ANY_PROCESSOR),
        }
        return cache_on_disk().obtain(parts, build).directory / OBJECT

    def link(
        self,
        operators: Iterable[str],
        kernels: Sequence[KernelObject],
        generated: Sequence[GeneratedFile],
        compiled: Sequence[Path],
    ) -> CacheEntry:
        """Link kernels into a library.

        Args:
            operators: Names of the operators, for the list of the cache.
            kernels: The kernels.
            generated: Files that are generated for it.
            compiled: Results of `compiled`.

        Returns:
            Entry whose directory holds the library.

        Raises:
            ToolchainError: If there is no compiler, or it does not link.
        """
        toolchain = kernel_toolchain()
        flags = [*_LINKING, *(_LINKING_KERNELS if kernels else ()), *self.linking]

        def build(directory: Path) -> None:
            self._copy_headers(directory)
            (directory / "exported").write_text(self.exported, encoding="utf-8")
            (directory / "empty.cpp").write_text("", encoding="utf-8")
            for stub in self.stubs:
                self._make(
                    toolchain, ["-shared", "-fPIC", f"-Wl,-soname,{stub}", "empty.cpp"], directory, stub
                )
            for file in generated:
                for name, content in file.beside.items():
                    (directory / name).write_bytes(content)
                (directory / file.name).write_text(file.text, encoding="utf-8")
                self._make(toolchain, [*file.flags, "-c", file.name], directory, file.object)
            objects = [*(each.object for each in generated), *map(str, compiled)]
            given = [word for linking in dict.fromkeys(each.linking for each in kernels) for word in linking]
            words = [*objects, *(str(each.path) for each in kernels), *given, *self.stubs, "-ldl"]
            self._make(toolchain, [*flags, *words], directory, self.name)

        parts = {
            "kind": self.kind,
            "operator": ", ".join(operators),
            "text": "\0".join(f"{each.name}\0{each.text}" for each in generated),
            "glue": _texts(self.headers),
            "objects": " ".join(each.parent.name for each in (*compiled, *(one.path for one in kernels))),
            "files": " ".join(
                key_of({name: content.hex()}) for each in generated for name, content in each.beside.items()
            ),
            **build_parts(toolchain, [*(flag for each in generated for flag in each.flags), *flags]),
        }
        return cache_on_disk().obtain(parts, build)

    def _copy_headers(self, directory: Path) -> None:
        for path in (HEADER, *self.headers):
            (directory / path.name).write_bytes(path.read_bytes())

    def _make(self, toolchain: Toolchain, arguments: Sequence[str], directory: Path, output: str) -> None:
        toolchain.build(f"a library for {self.program}", [*arguments, "-o", output], directory, LINKING)


def require_compiler() -> None:
    """Look for the compiler of libraries.

    Raises:
        ToolchainError: If there is none.
    """
    kernel_toolchain()


def _texts(files: Iterable[Path]) -> str:
    return "\0".join(path.read_text(encoding="utf-8") for path in files)
