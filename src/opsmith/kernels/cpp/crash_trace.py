"""Line of a C++ kernel at which a process died or timed out."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from opsmith import errors
from opsmith.build.cache import cache_on_disk, parts_of
from opsmith.build.symbols import Line, lines_at
from opsmith.build.toolchain import find_toolchain
from opsmith.core.kernels import Kernel
from opsmith.kernels.cpp.compiler import build_parts
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cpp.source import CppSource
from opsmith.kernels.runtime.loading import LIBRARY

TRACE = Path(__file__).with_name("trace.cpp")
BEGINNING = "C++ frame: "
"""Prefix of the output lines that describe frames."""

_FRAME = re.compile(rf"^{re.escape(BEGINNING)}(?P<library>/.*) (?P<address>0x[0-9a-f]+)$", re.MULTILINE)


def traced_sources(kernels: Iterable[Kernel]) -> tuple[CppSource, ...]:
    """Return the sources of the kernels that run in this process and whose crashes have a source line."""
    return tuple(each.given.source for each in kernels if isinstance(each.given, CppKernel))


@cache
def tracer() -> Path | None:
    """Compile the library of trace.cpp; None if there is no compiler, or it cannot be compiled."""
    try:
        toolchain = find_toolchain()
    except errors.ToolchainError:
        return None
    text = TRACE.read_text(encoding="utf-8")
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]

    def build(directory: Path) -> None:
        (directory / TRACE.name).write_text(text, encoding="utf-8")
        arguments = [*flags, TRACE.name, "-o", LIBRARY, "-ldl"]
        toolchain.build("the library that traces crashes", arguments, directory, "one of C++17")

    parts = {"kind": "trace", "text": text, **build_parts(toolchain, flags)}
    try:
        return cache_on_disk().obtain(parts, build).directory / LIBRARY
    except errors.ToolchainError:  # for example a C library without `backtrace`
        return None


def trace(library: Path, file: int) -> None:
    """Write a stack trace to a file when this process dies, or receives SIGUSR1.

    Args:
        library: See `tracer`.
        file: File descriptor.
    """
    _loaded(library).opsmith_trace(ctypes.c_int(file))


def trace_exit(library: Path, file: int) -> None:
    """Write a stack trace to a file when this process calls `exit`.

    Args:
        library: See `tracer`.
        file: File descriptor.
    """
    _loaded(library).opsmith_trace_exit(ctypes.c_int(file))


def _loaded(library: Path) -> ctypes.CDLL:
    """Load the library globally, so that kernels find the function that they call instead of `exit`."""
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def lines_in(printed: str) -> list[Line]:
    """Return the kernels' lines in a stack trace, the innermost first."""
    frames = _in_kernels(printed)
    return [line for library, address in frames for line in lines_at(library, [address])[0]]


def location_in(printed: str, sources: Sequence[CppSource]) -> tuple[str, str] | None:
    """Return `file:line` of the innermost frame in a kernel, and the text of that line.

    If the line is unknown, return the location of the kernel's function, without text. None if no frame is in
    a kernel.

    Args:
        printed: Output of the process.
        sources: Kernels that may have run.
    """
    for line in lines_in(printed):
        for source in sources:
            if line.is_of(source.path):
                return f"{source.path}:{line.number}", source.quoted(line.number).strip()
    for library, _ in _in_kernels(printed):
        source_of_entry = _source_of(parts_of(library.parent), sources)
        if source_of_entry is not None:
            return source_of_entry.where, ""
    return None


def _in_kernels(printed: str) -> list[tuple[Path, int]]:
    """Return libraries and addresses of the frames in kernels; each address is moved back to its call."""
    frames = [(Path(match["library"]), int(match["address"], 16) - 1) for match in _FRAME.finditer(printed)]
    return [(library, address) for library, address in frames if library.name == LIBRARY]


def _source_of(parts: Mapping[str, str], sources: Sequence[CppSource]) -> CppSource | None:
    """Return the kernel that an entry of the cache was built from."""
    return next((each for each in sources if each.text in parts.get("text", "")), None)
