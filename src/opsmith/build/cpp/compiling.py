"""From the text of a C++ kernel to a library on disk, through the cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from opsmith import errors
from opsmith.build.cache import Entry, cache_on_disk
from opsmith.build.cpp.diagnostics import told
from opsmith.build.cpp.generating import generated
from opsmith.build.cpp.sanitizing import flags_in_force
from opsmith.build.cpp.source import CppSource
from opsmith.build.includes import has_includes, include_parts
from opsmith.build.toolchain import FLAGS, Toolchain, cpu_model, find_toolchain

HERE = Path(__file__).parent
HEADER, RUNTIME = HERE / "opsmith.h", HERE / "runtime.cpp"
RUNTIME_HEADERS = tuple(
    HERE / name for name in ("stable_torch.h", "python_errors.h", "arguments.h", "plans.h")
)
LIBRARY = "kernel.so"
STUB = "libtorch_cpu.so"
"""Linked against in the place of torch's own, which takes a third of a second: it has the same name."""


def compiled(source: CppSource, operator: str, dtypes: tuple[torch.dtype, ...], shapes: str = "") -> Entry:
    """Compile a kernel, or find it compiled.

    Args:
        source: What its author wrote.
        operator: Name of the operator.
        dtypes: Those that a template is made for.
        shapes: What `shapes=` says, in C++.

    Returns:
        An entry whose directory holds `LIBRARY`.

    Raises:
        CompileError: If the compiler refuses the source: its errors, in the author's lines.
        ToolchainError: If there is no compiler, or this system is none that kernels are built on.
    """
    toolchain = toolchain_here()
    text, flags = generated(source, operator, dtypes, shapes), [*flags_in_force()]
    flags += include_flags(source)

    def build(directory: Path) -> None:
        (directory / "opsmith.h").write_bytes(HEADER.read_bytes())
        (directory / "kernel.cpp").write_text(text, encoding="utf-8")
        done = toolchain.run([*flags, "kernel.cpp", "-o", LIBRARY], directory)
        if done.status:
            raise refused(source, operator, done.printed)

    parts = {"kind": "cpp", "operator": operator, "text": text, **surroundings(toolchain, flags)}
    parts |= include_parts(source.text, source.folder)
    return cache_on_disk().obtain(parts, build)


def runtime() -> Entry:
    """The library between torch and all kernels, compiled once on a machine.

    Raises:
        ToolchainError: As `compiled`.
    """
    toolchain = toolchain_here()

    def build(directory: Path) -> None:
        (directory / "empty.cpp").write_text("")
        for path in (HEADER, RUNTIME, *RUNTIME_HEADERS):
            (directory / path.name).write_bytes(path.read_bytes())
        flags = ["-std=c++17", "-fPIC", "-shared"]
        for arguments in (
            [*flags, f"-Wl,-soname,{STUB}", "empty.cpp", "-o", STUB],
            [*flags, "-O2", "-fvisibility=hidden", "-Wl,--no-as-needed", RUNTIME.name, STUB, "-o", LIBRARY],
        ):
            done = toolchain.run(arguments, directory)
            if done.status:
                raise errors.ToolchainError(
                    "the C++ compiler does not compile opsmith's own library",
                    expected="a compiler of C++17, as g++ 9 or clang 10",
                    got=done.printed.strip(),
                    hint="name another compiler in CXX",
                )

    text = "".join(path.read_text(encoding="utf-8") for path in (RUNTIME, *RUNTIME_HEADERS))
    return cache_on_disk().obtain({"kind": "runtime", "text": text, **surroundings(toolchain, FLAGS)}, build)


def include_flags(source: CppSource) -> list[str]:
    """What has the compiler find the headers that a kernel includes between quotes."""
    if source.folder is None or not has_includes(source.text):
        return []
    return ["-iquote", source.folder, "-iquote", "."]  # the second for headers that include opsmith.h


def refused(source: CppSource, operator: str, printed: str) -> errors.CompileError:
    """The error for a kernel that the compiler refuses, from what it printed."""
    return errors.CompileError(
        "the C++ compiler refuses the kernel",
        operator=operator,
        got="\n".join(f"    {line}" for line in told(printed, source).splitlines()).lstrip(),
        where=source.where,
        hint="fix the first of these; those after it may follow from it",
    )


def toolchain_here() -> Toolchain:
    """The compiler that kernels are built with.

    Raises:
        ToolchainError: If there is none, or this system is none that kernels are built on.
    """
    if sys.platform != "linux":
        raise errors.ToolchainError(
            f"C++ kernels are not built on {sys.platform} yet",
            expected="Linux",
            got=sys.platform,
            hint="leave the kernel there, and the reference computes the operator; or give one in Python",
        )
    return find_toolchain()


def surroundings(toolchain: Toolchain, flags: Sequence[str]) -> dict[str, str]:
    """What else than its own text decides what a library holds."""
    return {
        "header": HEADER.read_text(encoding="utf-8"),
        "flags": " ".join(flags),
        "compiler": " ".join((*toolchain.command, toolchain.identity)),
        "cpu": cpu_model(),
    }
