"""Library of C++ kernels for ONNX Runtime, linked through the cache, without torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from opsmith import errors
from opsmith.build.cache import CacheEntry, cache_on_disk, key_of
from opsmith.build.compiler_options import refuse_missing_library
from opsmith.build.toolchain import FLAGS, LIMIT_S, Toolchain
from opsmith.kernels.cpp.codegen import TABLE, kernel_code
from opsmith.kernels.cpp.compiler import (
    HEADER,
    KernelCompiler,
    build_parts,
    include_flags,
    kernel_toolchain,
)
from opsmith.kernels.cpp.source import CppSource
from opsmith.kernels.ort.nodes import NodeType, generated_nodes

HERE = Path(__file__).parent
REGISTERING = HERE / "library.cpp"
HEADERS = tuple(
    HERE / name for name in ("ort_api.h", "nodes.h", "processor.h", "attributes.h", "layouts.h", "call.h")
)
LIBRARY = "nodes.so"
OBJECT = "kernel.o"
KIND = "onnx kernel"

ANY_PROCESSOR = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pipe")
THIS_PROCESSOR = tuple(flag for flag in FLAGS if not flag.startswith(("-Wl", "-g", "-shared", "-l")))
"""Flags without debug information, so that the library contains no paths of this machine."""
_LINKING = (
    *("-shared", "-fPIC", "-fopenmp", "-pthread", "-Wl,--no-undefined", "-Wl,-s"),
    "-Wl,--version-script=exported",
)
_EXPORTED = "{ global: RegisterCustomOps; local: *; };\n"


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


def flags_for(processor: str) -> tuple[str, ...]:
    """Return the flags for a processor, `native` or one that `-march=` takes."""
    return tuple(f"-march={processor}" if flag == "-march=native" else flag for flag in THIS_PROCESSOR)


def kernel_object(
    source: CppSource,
    operator: str,
    dtypes: tuple[torch.dtype, ...],
    shapes: str = "",
    processor: str = "native",
) -> KernelObject:
    """Compile a kernel for a library, or find it in the cache.

    Args:
        source: The author's source.
        operator: Name of the operator.
        dtypes: The dtypes that a template is instantiated for.
        shapes: See `shapes_in_cpp`.
        processor: See `flags_for`.

    Raises:
        CompileError: If the compiler refuses the source.
        ToolchainError: If there is no compiler, or one of its tools is missing.
    """
    toolchain = kernel_toolchain()
    flags = [*flags_for(processor), *include_flags(source), *source.options.compiling, *_path_flags(source)]
    if "clang" not in toolchain.identity:
        flags.append("-fno-gnu-unique")  # else equal names are merged across a process
    text = kernel_code(source, operator, dtypes, shapes)
    compiler = KernelCompiler(toolchain, source, operator, text, flags)
    table = f"{TABLE}_{key_of(compiler.parts(KIND))}"

    def build(compiler: KernelCompiler, directory: Path) -> None:
        compiler.run(["-c", "-o", "compiled.o"], directory)
        # Definitions shared between templates are merged here, before other kernels are linked.
        merging = ["-r", "-nostdlib", "-Wl,--force-group-allocation", "-Wl,--wrap=exit", "compiled.o"]
        _build(toolchain, merging, directory, "alone.o")
        _make_local(directory, table)

    path = compiler.obtain(KIND, build).directory / OBJECT
    return KernelObject(table, path, tuple(source.options.linking(toolchain)))


def _path_flags(source: CppSource) -> list[str]:
    """Return the flags that shorten `__FILE__`, as in `assert`, to the name of a file."""
    folders = {str(Path(source.path).parent), source.folder or ""}
    return [f"-fmacro-prefix-map={each}/=" for each in sorted(folders) if Path(each).is_absolute()]


def link_library(kernels: Sequence[KernelObject], types: Sequence[NodeType]) -> CacheEntry:
    """Link kernels into a library that computes nodes of these types.

    Args:
        kernels: All kernels of the types.
        types: Types of nodes, at least one.

    Returns:
        Entry whose directory holds `LIBRARY`.

    Raises:
        ToolchainError: If there is no compiler, or it does not link.
    """
    toolchain = kernel_toolchain()
    registration = _registration(toolchain) / OBJECT
    text = generated_nodes(types)

    def build(directory: Path) -> None:
        _copy_headers(directory)
        (directory / "nodes.cpp").write_text(text, encoding="utf-8")
        (directory / "exported").write_text(_EXPORTED, encoding="utf-8")
        _build(toolchain, [*THIS_PROCESSOR, "-c", "nodes.cpp"], directory, "nodes.o")
        objects = ["nodes.o", str(registration), *(str(each.path) for each in kernels)]
        given = [word for linking in dict.fromkeys(each.linking for each in kernels) for word in linking]
        _build(toolchain, [*_LINKING, *objects, *given, "-ldl"], directory, LIBRARY)

    flags = [*THIS_PROCESSOR, *_LINKING]
    names = ", ".join(dict.fromkeys(each.operator.name for each in types))
    parts = {
        "kind": "onnx library",
        "operator": names,
        "text": text,
        "glue": _glue(),
        "objects": " ".join(each.path.parent.name for each in kernels),
        **build_parts(toolchain, flags),
    }
    return cache_on_disk().obtain(parts, build)


def _registration(toolchain: Toolchain) -> Path:
    """Compile the code that registers nodes, once on a machine, for the baseline processor."""

    def build(directory: Path) -> None:
        _copy_headers(directory)
        (directory / REGISTERING.name).write_bytes(REGISTERING.read_bytes())
        _build(toolchain, [*ANY_PROCESSOR, "-c", REGISTERING.name], directory, OBJECT)

    parts = {"kind": "onnx registering", "text": _glue(), **build_parts(toolchain, ANY_PROCESSOR)}
    return cache_on_disk().obtain(parts, build).directory


def _glue() -> str:
    return "\0".join(path.read_text(encoding="utf-8") for path in (REGISTERING, *HEADERS))


def _copy_headers(directory: Path) -> None:
    for path in (HEADER, *HEADERS):
        (directory / path.name).write_bytes(path.read_bytes())


def _build(toolchain: Toolchain, arguments: Sequence[str], directory: Path, output: str) -> None:
    done = toolchain.run([*arguments, "-o", output], directory)
    if done.status:
        refuse_missing_library(done.printed)
        raise errors.ToolchainError(
            "the C++ compiler does not make a library for ONNX Runtime",
            expected="a compiler of C++17 with GNU's linker, as g++ 9 with binutils 2.29",
            got=done.printed.strip(),
            hint="name another compiler in CXX",
        )
    toolchain.refuse_incomplete(directory / output)


def _objcopy() -> str | None:
    return shutil.which("objcopy")


def _make_local(directory: Path, table: str) -> None:
    """Make all symbols of a kernel local, except its table, which gets a unique name."""
    program = _objcopy()
    if program is None:
        raise errors.ToolchainError(
            "a kernel cannot be linked without `objcopy`, which comes with GNU's linker",
            expected="`objcopy` in PATH",
            got="none of that name",
            hint="install it, on Debian or Ubuntu by `apt-get install binutils`",
        )
    command = [program, f"--redefine-sym={TABLE}={table}", f"--keep-global-symbol={table}", "alone.o", OBJECT]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _objcopy_error(f"it did not end within {LIMIT_S} s") from error
    if done.returncode:
        raise _objcopy_error(done.stderr.decode(errors="replace").strip())


def _objcopy_error(got: str) -> errors.ToolchainError:
    return errors.ToolchainError(
        "`objcopy` does not make a kernel's symbols local",
        expected="GNU binutils 2.29 or later",
        got=got,
        hint="install them, on Debian or Ubuntu by `apt-get install binutils`",
    )
