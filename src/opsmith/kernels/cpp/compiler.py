"""Compilation of a C++ kernel to a library, through the cache."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

from opsmith import errors
from opsmith.build import dependencies
from opsmith.build.cache import CacheEntry, cache_on_disk
from opsmith.build.compiler_options import refuse_missing_library
from opsmith.build.dependencies import (
    PREPROCESSED,
    SOURCE,
    Dependencies,
    PreprocessedText,
    PreprocessorError,
    obtain_with_dependencies,
    preprocess,
    system_folders,
)
from opsmith.build.source_text import has_includes
from opsmith.build.toolchain import FLAGS, Toolchain, compiler_variables, cpu_model, find_toolchain
from opsmith.kernels.cpp.codegen import kernel_code
from opsmith.kernels.cpp.diagnostics import changing_headers, compile_error, own_headers, quoted_errors
from opsmith.kernels.cpp.source import CppSource
from opsmith.kernels.runtime.loading import LIBRARY

HERE = Path(__file__).parent
HEADER = HERE / "opsmith.h"
OBJECT, WARNINGS = "kernel.o", "warnings.txt"
STUB = "libtorch_cpu.so"
"""Empty library with the name of torch's library, since linking against torch's takes a third of a second."""


@dataclass(frozen=True, slots=True)
class _Manner:
    """Settings with which kernels are built in a context.

    Attributes:
        first: Flags that the author's flags may override.
        last: Flags that override the author's flags.
        home: Folder in a package for the built kernels; None if they are only for this machine.
    """

    first: Sequence[str] = FLAGS
    last: Sequence[str] = ()
    home: Path | None = None

    @property
    def beginning(self) -> str:
        """Prefix of paths, up to the package's folder, that kernels built for a package must not contain."""
        return "" if self.home is None else os.path.join(self.home.parent.parent, "")

    @property
    def path_flags(self) -> tuple[str, ...]:
        """Flags that remove this prefix."""
        return (f"-ffile-prefix-map={self.beginning}=",) if self.beginning else ()


_USUAL = _Manner()
_manner: ContextVar[_Manner] = ContextVar("build_manner", default=_USUAL)


def build_flags() -> Sequence[str]:
    """Return the compiler's flags for all kernels in this context."""
    manner = _manner.get()
    return (*manner.first, *manner.last, *manner.path_flags)


def builds_as_usual() -> bool:
    """Return True if kernels are built with `FLAGS` in this context, for this machine."""
    return _manner.get() == _USUAL


def kernel_flags(source: CppSource) -> list[str]:
    """Return the compiler's flags for a kernel in this context, including its author's flags."""
    manner = _manner.get()
    own = [*include_flags(source), *source.options.compiling]
    return [*manner.first, *own, *manner.last, *manner.path_flags]


@contextmanager
def building_with(flags: Sequence[str], last: Sequence[str] = (), home: Path | None = None) -> Iterator[None]:
    """Context manager in which kernels are built with these flags instead of `FLAGS`.

    Args:
        flags: Flags that the author's flags may override.
        last: Flags that override the author's flags.
        home: Folder in a package for the built kernels, whose path they do not contain; None if they are
            only for this machine.
    """
    before = _manner.set(_Manner(flags, last, home))
    try:
        yield
    finally:
        _manner.reset(before)


def compile_kernel(source: CppSource, operator: str, dtypes: tuple[torch.dtype, ...]) -> CacheEntry:
    """Compile a kernel to a library, or find it in the cache.

    Args:
        source: The author's source.
        operator: Name of the operator.
        dtypes: The dtypes for which a template is instantiated.

    Returns:
        Entry whose directory contains `LIBRARY`.

    Raises:
        CompileError: If the compiler refuses the source, with its errors at the author's lines.
        ToolchainError: If there is no compiler, or kernels are not built on this system.
    """
    return _kernel_compiler(source, operator, dtypes).obtain("cpp", KernelCompiler.build_library)


def compile_with_headers(
    source: CppSource, operator: str, dtypes: tuple[torch.dtype, ...]
) -> tuple[CacheEntry, Mapping[str, str]]:
    """Compile a kernel as `compile_kernel` does, and return the digests of its headers, too.

    Returns:
        The entry, and the digest of each header that does not belong to the system, by its absolute path.

    Raises:
        CompileError: Also if the headers change each time that they are read.
        ToolchainError: See `compile_kernel`.
    """
    compiler = _kernel_compiler(source, operator, dtypes)
    entry, read = compiler.obtain_with_dependencies("cpp", KernelCompiler.build_library)
    if read is None:
        raise changing_headers(source, operator, dependencies.ATTEMPTS)
    folders = compiler.system_folders()
    return entry, {
        path: digest
        for path, (_, digest) in read.files.items()
        if not any(
            Path(form(path)).is_relative_to(each)
            for each in folders
            for form in (os.path.normpath, os.path.realpath)  # a header may be a link out of its folder
        )
    }


def index_warnings(source: CppSource, operator: str, dtypes: tuple[torch.dtype, ...]) -> str:
    """Return the compiler's output for a kernel if indices of 32 bits are errors; see `compile_kernel`."""
    compiler = _kernel_compiler(source, operator, dtypes)
    entry = compiler.obtain("cpp indices in 32 bits", KernelCompiler.build_warnings)
    return (entry.directory / WARNINGS).read_text(encoding="utf-8", errors="surrogateescape")


def _kernel_compiler(source: CppSource, operator: str, dtypes: tuple[torch.dtype, ...]) -> KernelCompiler:
    text = kernel_code(source, operator, dtypes)
    return KernelCompiler(kernel_toolchain(), source, operator, text, kernel_flags(source))


@dataclass(frozen=True, slots=True)
class KernelCompiler:
    """Compiler of the text of one kernel, through the cache.

    Attributes:
        toolchain: The compiler.
        source: The author's source.
        operator: Name of the operator.
        text: Text to compile.
        flags: Flags of the compiler.
    """

    toolchain: Toolchain
    source: CppSource
    operator: str
    text: str
    flags: Sequence[str]

    def parts(self, kind: str) -> dict[str, str]:
        """Return the parts of a cache key, without headers."""
        parts = {"kind": kind, "operator": self.operator, "text": self.text}
        options = self.source.options.parts(self.toolchain, _manner.get().home)
        return parts | build_parts(self.toolchain, self.flags) | options

    def system_folders(self) -> tuple[str, ...]:
        """Return the folders of the system's headers."""
        flags = (*build_flags(), *self.source.options.flags)
        return system_folders(self.toolchain, flags, compiler_variables())

    def obtain(self, kind: str, build: Callable[[KernelCompiler, Path], None]) -> CacheEntry:
        """Return the entry of the kernel; see `obtain_with_dependencies`."""
        return self.obtain_with_dependencies(kind, build)[0]

    def obtain_with_dependencies(
        self, kind: str, build: Callable[[KernelCompiler, Path], None]
    ) -> tuple[CacheEntry, Dependencies | None]:
        """Return the entry of the kernel, from the cache or built now, and the dependencies of its text.

        Args:
            kind: Kind of the entry.
            build: Function that builds it in a directory that contains the preprocessed text.

        Raises:
            CompileError: If the compiler refuses the source, with its errors at the author's lines, or a file
                that the author's options name does not exist.
        """

        def fill(directory: Path) -> None:
            (directory / SOURCE).write_text(self.text, encoding="utf-8")
            build(self, directory)

        with errors.about(self.operator, self.source.where):
            self.source.options.refuse_missing()
        home = _manner.get().beginning
        return obtain_with_dependencies(cache_on_disk(), self.parts(kind), self._preprocessed, fill, home)

    def run(self, arguments: Sequence[str], directory: Path) -> None:
        """Run the compiler on the preprocessed text.

        Raises:
            CompileError: If the compiler refuses the source.
        """
        done = self.toolchain.run([*self.flags, PREPROCESSED, *arguments], directory)
        if done.status:
            text = (directory / PREPROCESSED).read_text(encoding="utf-8", errors="surrogateescape")
            headers = frozenset(dependencies.own_headers(text))
            raise self._refused(self._messages() or done.printed, headers)

    def build_library(self, directory: Path) -> None:
        """Build `LIBRARY` from the preprocessed text; the linker does not get the compiler's own flags.

        Raises:
            CompileError: If the compiler or the linker refuses the source.
        """
        self.run(["-c", "-o", OBJECT], directory)
        self.toolchain.refuse_incomplete(directory / OBJECT)
        linking = self.source.options.linking(self.toolchain, _manner.get().home)
        done = self.toolchain.run([*build_flags(), OBJECT, *linking, "-o", LIBRARY], directory)
        if done.status:
            with errors.about(self.operator, self.source.where):
                refuse_missing_library(done.printed)
            raise self._refused(done.printed, frozenset())
        self.toolchain.refuse_incomplete(directory / LIBRARY)
        (directory / OBJECT).unlink()

    def build_warnings(self, directory: Path) -> None:
        """Write the compiler's output for the author's text if indices of 32 bits are errors."""
        own = [each for each in self.flags if each != "-w"]
        wanted = ["-DOPSMITH_INDEX_TYPES", "-Werror=deprecated-declarations", "-ftabstop=1", "-fsyntax-only"]
        (directory / HEADER.name).write_bytes(HEADER.read_bytes())
        done = self.toolchain.run([*own, *wanted, SOURCE], directory)
        if done.status and "[-W" not in done.printed:  # a real error, not a warning
            raise self._refused(done.printed, own_headers(self.source))
        (directory / WARNINGS).write_text(done.printed, encoding="utf-8", errors="surrogateescape")

    def _preprocessed(self) -> PreprocessedText:
        files = {SOURCE: self.text, HEADER.name: HEADER.read_text(encoding="utf-8")}
        try:
            return preprocess(self.toolchain, self.flags, files)
        except PreprocessorError as error:
            raise self._refused(error.printed, own_headers(self.source)) from None
        except OSError as error:
            raise errors.CacheError(
                "a kernel cannot be built, because no temporary file can be written",
                operator=self.operator,
                expected="free space in the directory for temporary files",
                got=str(error),
                hint="free some space, or set TMPDIR to a directory that can be written",
            ) from error

    def _messages(self) -> str:
        """Compile the author's text only for its errors: the columns in a preprocessed text differ."""
        with tempfile.TemporaryDirectory(prefix="opsmith-") as scratch:
            directory = Path(scratch)
            (directory / SOURCE).write_text(self.text, encoding="utf-8")
            (directory / HEADER.name).write_bytes(HEADER.read_bytes())
            done = self.toolchain.run([*self.flags, "-fsyntax-only", SOURCE], directory)
        return done.printed if done.status else ""

    def _refused(self, printed: str, headers: frozenset[str]) -> errors.CompileError:
        quoted = quoted_errors(printed, self.source, headers)
        return compile_error("the C++ compiler", self.source, self.operator, quoted)


def include_flags(source: CppSource) -> list[str]:
    """Return the flags for headers that a kernel includes with quotes."""
    if source.folder is None or not has_includes(source.text):
        return []
    return ["-iquote", source.folder, "-iquote", "."]  # "." for headers that include opsmith.h


def kernel_toolchain() -> Toolchain:
    """Return the compiler that builds kernels.

    Raises:
        ToolchainError: If there is no compiler, or kernels are not built on this system.
    """
    if sys.platform != "linux":
        raise errors.ToolchainError(
            f"C++ kernels are not built on {sys.platform} yet",
            expected="Linux",
            got=sys.platform,
            hint="keep the kernel: here the reference computes the operator. Or add a kernel in Python",
        )
    return find_toolchain()


def build_parts(toolchain: Toolchain, flags: Sequence[str]) -> dict[str, str]:
    """Return the parts of a cache key that do not depend on the kernel's text."""
    return {
        "header": HEADER.read_text(encoding="utf-8"),
        "flags": shlex.join(flags),
        "compiler": " ".join((*toolchain.command, toolchain.identity)),
        "environment": compiler_variables(),
        "cpu": cpu_model(),
    }
