"""Library of C++ kernels for torch's dispatcher, linked through the cache, without Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opsmith import errors
from opsmith.build.cache import CacheEntry, cache_on_disk
from opsmith.build.toolchain import Toolchain
from opsmith.kernels.cpp import compiler
from opsmith.kernels.cpp.compiler import HEADER, STUB, build_parts, kernel_toolchain
from opsmith.kernels.ort import library as ort
from opsmith.kernels.ort.library import ANY_PROCESSOR, KernelObject, flags_for
from opsmith.kernels.serving.tables import ServedOperator, served_tables

HERE = Path(__file__).parent
REGISTERING = HERE / "library.cpp"
HEADERS = (
    HEADER,
    *(HERE / name for name in ("call.h", "tables.h")),
    *(compiler.HERE / name for name in ("stable_torch.h", "arguments.h", "plans.h", "calls.h")),
    ort.HERE / "processor.h",
)
LIBRARY = "served.so"
OBJECT = "registering.o"
_LINKING = (
    *("-shared", "-fPIC", "-fopenmp", "-pthread", "-Wl,-s"),
    # Torch holds the kernels as long as the process.
    *("-Wl,-z,nodelete", "-Wl,--no-as-needed"),
    "-Wl,--version-script=exported",
)
_EXPORTED = "{ local: *; };\n"


def link_library(
    kernels: Sequence[KernelObject], operators: Sequence[ServedOperator], processor: str = "native"
) -> CacheEntry:
    """Link kernels into a library that gives operators to torch's dispatcher.

    Args:
        kernels: All kernels of the operators.
        operators: The operators, at least one.
        processor: The one that the kernels were compiled for.

    Returns:
        Entry whose directory holds `LIBRARY`.

    Raises:
        ToolchainError: If there is no compiler, or it does not link.
    """
    toolchain = kernel_toolchain()
    registration = _registration(toolchain) / OBJECT
    text, flags = served_tables(operators), flags_for(processor)

    def build(directory: Path) -> None:
        _copy_headers(directory)
        (directory / "tables.cpp").write_text(text, encoding="utf-8")
        (directory / "exported").write_text(_EXPORTED, encoding="utf-8")
        (directory / "empty.cpp").write_text("", encoding="utf-8")
        soname = f"-Wl,-soname,{STUB}"
        _build(toolchain, ["-shared", "-fPIC", soname, "empty.cpp"], directory, STUB)
        _build(toolchain, [*flags, "-c", "tables.cpp"], directory, "tables.o")
        objects = ["tables.o", str(registration), *(str(each.path) for each in kernels)]
        given = [word for linking in dict.fromkeys(each.linking for each in kernels) for word in linking]
        _build(toolchain, [*_LINKING, *objects, *given, STUB, "-ldl"], directory, LIBRARY)

    parts = {
        "kind": "torch library",
        "operator": ", ".join(each.name for each in operators),
        "text": text,
        "glue": _glue(),
        "objects": " ".join(each.path.parent.name for each in kernels),
        **build_parts(toolchain, [*flags, *_LINKING]),
    }
    return cache_on_disk().obtain(parts, build)


def _registration(toolchain: Toolchain) -> Path:
    """Compile the code that registers operators, once on a machine, for the baseline processor."""

    def build(directory: Path) -> None:
        _copy_headers(directory)
        (directory / REGISTERING.name).write_bytes(REGISTERING.read_bytes())
        _build(toolchain, [*ANY_PROCESSOR, "-c", REGISTERING.name], directory, OBJECT)

    parts = {"kind": "torch library registering", "text": _glue(), **build_parts(toolchain, ANY_PROCESSOR)}
    return cache_on_disk().obtain(parts, build).directory


def _glue() -> str:
    return "\0".join(path.read_text(encoding="utf-8") for path in (REGISTERING, *HEADERS))


def _copy_headers(directory: Path) -> None:
    for path in HEADERS:
        (directory / path.name).write_bytes(path.read_bytes())


def _build(toolchain: Toolchain, arguments: Sequence[str], directory: Path, output: str) -> None:
    done = toolchain.run([*arguments, "-o", output], directory)
    if done.status:
        raise errors.ToolchainError(
            "the C++ compiler does not make a library for torch",
            expected="a compiler of C++17 with GNU's linker, as g++ 9 with binutils 2.29",
            got=done.printed.strip(),
            hint="name another compiler in CXX",
        )
    toolchain.refuse_incomplete(directory / output)
