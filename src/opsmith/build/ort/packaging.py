"""From kernels in C++ to one library that ONNX Runtime loads, through the cache; nothing of torch is in it.

Kernels of different authors may define the same names, and a linker would take one definition for all. So
each is linked by itself first, and of its names all but the table of its instances are made its own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from opsmith import errors
from opsmith.build.cache import Entry, cache_on_disk
from opsmith.build.cpp.compiling import HEADER, include_flags, refused, surroundings, toolchain_here
from opsmith.build.cpp.generating import generated
from opsmith.build.cpp.source import CppSource
from opsmith.build.entry import key_of
from opsmith.build.includes import include_parts
from opsmith.build.ort.generating import NodeType, generated_nodes
from opsmith.build.toolchain import FLAGS, LIMIT_S, Toolchain

HERE = Path(__file__).parent
REGISTERING = HERE / "library.cpp"
HEADERS = tuple(
    HERE / name for name in ("ort_api.h", "nodes.h", "processor.h", "attributes.h", "layouts.h", "call.h")
)
LIBRARY = "nodes.so"
OBJECT = "kernel.o"
TABLE = "opsmith_kernel"
"""The name under which a compiled kernel has the table of its instances; in a library it has a number."""

ANY_PROCESSOR = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pipe")
_THIS_PROCESSOR = tuple(flag for flag in FLAGS if not flag.startswith(("-Wl", "-g", "-shared", "-l")))
"""Without lines: what is handed over is to hold no paths of the machine that it was built on."""
_LINKING = (
    *("-shared", "-fPIC", "-fopenmp", "-pthread", "-Wl,--no-undefined", "-Wl,-s"),
    "-Wl,--version-script=exported",
)
_EXPORTED = "{ global: RegisterCustomOps; local: *; };\n"


@dataclass(frozen=True, slots=True)
class KernelObject:
    """A compiled kernel that can be linked into a library.

    Attributes:
        table: The name of the table of its instances.
        path: The file.
    """

    table: str
    path: Path


def kernel_object(
    source: CppSource, operator: str, dtypes: tuple[torch.dtype, ...], shapes: str = ""
) -> KernelObject:
    """Compile a kernel for a library, or find it compiled.

    Args:
        source: What its author wrote.
        operator: Name of the operator.
        dtypes: Those that a template is made for.
        shapes: What `shapes=` says, in C++.

    Raises:
        CompileError: If the compiler refuses the source.
        ToolchainError: If there is no compiler, or a tool is missing that comes with it.
    """
    toolchain = toolchain_here()
    flags = [*_THIS_PROCESSOR, *include_flags(source), *_without_folders(source)]
    if "clang" not in toolchain.identity:
        flags.append("-fno-gnu-unique")  # names that are one in a process, whatever is linked
    text = generated(source, operator, dtypes, shapes)
    parts = {"kind": "onnx kernel", "operator": operator, "text": text, **surroundings(toolchain, flags)}
    parts |= include_parts(source.text, source.folder)
    table = f"{TABLE}_{key_of(parts)}"

    def build(directory: Path) -> None:
        (directory / HEADER.name).write_bytes(HEADER.read_bytes())
        (directory / "kernel.cpp").write_text(text, encoding="utf-8")
        done = toolchain.run([*flags, "-c", "kernel.cpp", "-o", "compiled.o"], directory)
        if done.status:
            raise refused(source, operator, done.printed)
        # Names that templates have in common are settled here, and not where other kernels have them too.
        alone = ["-r", "-nostdlib", "-Wl,--force-group-allocation", "-Wl,--wrap=exit", "compiled.o"]
        _must(toolchain, [*alone, "-o", "alone.o"], directory)
        _make_own(directory, table)

    entry = cache_on_disk().obtain(parts, build)
    return KernelObject(table, entry.directory / OBJECT)


def _without_folders(source: CppSource) -> list[str]:
    """What leaves names of files alone where a kernel writes `__FILE__`, as `assert` does."""
    folders = {str(Path(source.path).parent), source.folder or ""}
    return [f"-fmacro-prefix-map={each}/=" for each in sorted(folders) if Path(each).is_absolute()]


def packaged(kernels: Sequence[KernelObject], types: Sequence[NodeType]) -> Entry:
    """Link kernels into a library that computes nodes of these types.

    Args:
        kernels: All that the types name.
        types: At least one.

    Returns:
        An entry whose directory holds `LIBRARY`.

    Raises:
        ToolchainError: If there is no compiler, or it does not link.
    """
    toolchain = toolchain_here()
    registering = _registering(toolchain) / OBJECT
    text = generated_nodes(types)

    def build(directory: Path) -> None:
        _copy_headers(directory)
        (directory / "nodes.cpp").write_text(text, encoding="utf-8")
        (directory / "exported").write_text(_EXPORTED, encoding="utf-8")
        _must(toolchain, [*_THIS_PROCESSOR, "-c", "nodes.cpp", "-o", "nodes.o"], directory)
        objects = ["nodes.o", str(registering), *(str(each.path) for each in kernels)]
        _must(toolchain, [*_LINKING, *objects, "-o", LIBRARY, "-ldl"], directory)

    flags = [*_THIS_PROCESSOR, *_LINKING]
    names = ", ".join(dict.fromkeys(each.operator.name for each in types))
    parts = {
        "kind": "onnx library",
        "operator": names,
        "text": text,
        "glue": _glue(),
        **surroundings(toolchain, flags),
    }
    return cache_on_disk().obtain(parts, build)


def _registering(toolchain: Toolchain) -> Path:
    """What registers nodes, compiled once on a machine, for every processor of its kind."""

    def build(directory: Path) -> None:
        _copy_headers(directory)
        (directory / REGISTERING.name).write_bytes(REGISTERING.read_bytes())
        _must(toolchain, [*ANY_PROCESSOR, "-c", REGISTERING.name, "-o", OBJECT], directory)

    parts = {"kind": "onnx registering", "text": _glue(), **surroundings(toolchain, ANY_PROCESSOR)}
    return cache_on_disk().obtain(parts, build).directory


def _glue() -> str:
    return "\0".join(path.read_text(encoding="utf-8") for path in (REGISTERING, *HEADERS))


def _copy_headers(directory: Path) -> None:
    for path in (HEADER, *HEADERS):
        (directory / path.name).write_bytes(path.read_bytes())


def _must(toolchain: Toolchain, arguments: Sequence[str], directory: Path) -> None:
    done = toolchain.run(list(arguments), directory)
    if done.status:
        raise errors.ToolchainError(
            "the C++ compiler does not make a library for ONNX Runtime",
            expected="a compiler of C++17 with GNU's linker, as g++ 9 with binutils 2.29",
            got=done.printed.strip(),
            hint="name another compiler in CXX",
        )


def _objcopy() -> str | None:
    return shutil.which("objcopy")


def _make_own(directory: Path, table: str) -> None:
    """Make all names of a kernel its own, but for its table, which has a name that nothing else has."""
    program = _objcopy()
    if program is None:
        raise errors.ToolchainError(
            "a kernel cannot be packaged without `objcopy`, which comes with GNU's linker",
            expected="`objcopy` in PATH",
            got="none of that name",
            hint="install it, on Debian or Ubuntu by `apt-get install binutils`",
        )
    command = [program, f"--redefine-sym={TABLE}={table}", f"--keep-global-symbol={table}", "alone.o", OBJECT]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _not_made_own(f"it did not end within {LIMIT_S} s") from error
    if done.returncode:
        raise _not_made_own(done.stderr.decode(errors="replace").strip())


def _not_made_own(got: str) -> errors.ToolchainError:
    return errors.ToolchainError(
        "`objcopy` does not make a kernel's names its own",
        expected="GNU binutils 2.29 or later",
        got=got,
        hint="install them, on Debian or Ubuntu by `apt-get install binutils`",
    )
