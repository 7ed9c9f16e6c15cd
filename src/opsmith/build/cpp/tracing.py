"""In which line of a C++ kernel a process died, or was when it took too long."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from opsmith import errors
from opsmith.build.cache import cache_on_disk
from opsmith.build.cpp.compiling import LIBRARY
from opsmith.build.cpp.source import CppSource
from opsmith.build.entry import parts_of
from opsmith.build.symbols import Line, lines_at
from opsmith.build.toolchain import cpu_model, find_toolchain

TRACE = Path(__file__).with_name("trace.cpp")
BEGINNING = "C++ frame: "
"""How each line begins that tells of a frame."""

_FRAME = re.compile(rf"^{re.escape(BEGINNING)}(?P<library>/.*) (?P<address>0x[0-9a-f]+)$", re.MULTILINE)


@cache
def tracer() -> Path | None:
    """The library that tells where a process dies; None where none can be built, as there is no compiler."""
    try:
        toolchain = find_toolchain()
    except errors.ToolchainError:
        return None
    text = TRACE.read_text(encoding="utf-8")
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]

    def build(directory: Path) -> None:
        (directory / TRACE.name).write_text(text, encoding="utf-8")
        done = toolchain.run([*flags, TRACE.name, "-o", LIBRARY, "-ldl"], directory)
        if done.status:
            raise errors.ToolchainError(
                "the C++ compiler does not compile what tells of crashes", got=done.printed.strip()
            )

    parts = {
        "kind": "trace",
        "text": text,
        "flags": " ".join(flags),
        "compiler": " ".join((*toolchain.command, toolchain.identity)),
        "cpu": cpu_model(),
    }
    try:
        return cache_on_disk().obtain(parts, build).directory / LIBRARY
    except errors.ToolchainError:  # as with a C library that knows no `backtrace`
        return None


def trace(library: Path, file: int) -> None:
    """Tell on a file, from now on, where this process dies, and where it is when it gets SIGUSR1.

    Args:
        library: See `tracer`.
        file: Its number.
    """
    _loaded(library).opsmith_trace(ctypes.c_int(file))


def trace_exit(library: Path, file: int) -> None:
    """Tell on a file where this process calls `exit`.

    Args:
        library: See `tracer`.
        file: Its number.
    """
    _loaded(library).opsmith_trace_exit(ctypes.c_int(file))


def _loaded(library: Path) -> ctypes.CDLL:
    """The library, where kernels look for what they call in the place of `exit`."""
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def lines_in(words: str) -> list[Line]:
    """The lines of kernels among the frames that a process told of, the innermost first."""
    frames = _in_kernels(words)
    return [line for library, address in frames for line in lines_at(library, [address])[0]]


def place_in(words: str, sources: Sequence[CppSource]) -> tuple[str, str] | None:
    """`file:line` of the innermost line of a kernel among the frames that a process told of, and that line.

    Where the line is not known it is that of the kernel's function; None where no frame is in a kernel.

    Args:
        words: What the process said.
        sources: The kernels that may have run.
    """
    for line in lines_in(words):
        for source in sources:
            if line.is_of(source.path):
                return f"{source.path}:{line.number}", source.quoted(line.number).strip()
    for library, _ in _in_kernels(words):
        reached = _of(parts_of(library.parent), sources)
        if reached is not None:
            return reached.where, ""
    return None


def _in_kernels(words: str) -> list[tuple[Path, int]]:
    """Libraries and addresses of the frames, each of which is told as what stands behind a call."""
    frames = [(Path(match["library"]), int(match["address"], 16) - 1) for match in _FRAME.finditer(words)]
    return [(library, address) for library, address in frames if library.name == LIBRARY]


def _of(parts: Mapping[str, str], sources: Sequence[CppSource]) -> CppSource | None:
    """The kernel that an entry of the cache was built from."""
    return next((each for each in sources if each.text in parts.get("text", "")), None)
