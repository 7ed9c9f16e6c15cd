"""C++ kernels built so that they tell of every read and write outside of their memory, and of every overflow.

The compiler's AddressSanitizer and UndefinedBehaviorSanitizer do it. What is built so runs in a process into
which the first's library was loaded before all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Literal

from opsmith import errors
from opsmith.build.toolchain import FLAGS, Toolchain

Fill = Literal["pattern", "zero"]
"""What variables hold that nothing was written to: a kernel whose results depend on it is wrong."""

_KEPT = [flag for flag in FLAGS if not flag.startswith(("-O", "-g"))]
_SANITIZING = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-ffp-contract=off",
    "-fsanitize=address,undefined",
    "-fsanitize-recover=address,undefined",
    "-fno-sanitize=nonnull-attribute",  # `memcpy` of no bytes, from the null that a tensor without any has
    # A kernel of many unrolled loops, which else takes a minute to compile, takes a third of it with these.
    "-fno-var-tracking",
    *("--param", "asan-instrumentation-with-call-threshold=0"),
)

_fill: ContextVar[Fill | None] = ContextVar("fill", default=None)

HEADER = "opsmith.h"
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so.6")


@contextmanager
def sanitized(fill: Fill) -> Iterator[None]:
    """A region in which kernels are built with sanitizers.

    Args:
        fill: What is in variables before something is written to them.
    """
    before = _fill.set(fill)
    try:
        yield
    finally:
        _fill.reset(before)


def flags_in_force() -> Sequence[str]:
    """The flags with which kernels are built here: the usual ones, but for a region that sanitizes."""
    fill = _fill.get()
    return FLAGS if fill is None else (*_KEPT, *_SANITIZING, f"-ftrivial-auto-var-init={fill}")


@cache
def preloaded(toolchain: Toolchain) -> tuple[Path, ...]:
    """The libraries that a process has to load first: AddressSanitizer's, and that of C++.

    Without the second the first finds no way to throw an exception.

    Raises:
        ToolchainError: If the compiler has none, or no library for undefined behaviour.
    """
    here = Path(__file__).parent
    found = [_library(toolchain, name, here) for name in LIBRARIES]
    tried = toolchain.run(["-ftrivial-auto-var-init=zero", "-fsyntax-only", "-x", "c++", HEADER], here)
    missing = [name for name, path in zip(LIBRARIES, found, strict=True) if path is None]
    if missing or tried.status:
        program = " ".join(toolchain.command)
        got = f"without {' and '.join(missing)}" if missing else tried.printed.strip()
        raise errors.ToolchainError(
            "the C++ compiler has no sanitizers that a sanitised check can use",
            expected="g++ 12 or later, with its libraries libasan.so and libubsan.so",
            got=f"{program}: {got}",
            hint="install g++ with its sanitizers, on Debian or Ubuntu by `apt-get install g++`, on Fedora "
            "by `dnf install gcc-c++ libasan libubsan`; where CXX names clang, name g++ in it",
        )
    return tuple(path for path in (found[0], found[2]) if path is not None)


def _library(toolchain: Toolchain, name: str, here: Path) -> Path | None:
    """Where a library is; a text in its place, as Fedora has it, names the library."""
    path = Path(toolchain.run([f"-print-file-name={name}"], here).printed.strip())
    if not path.is_absolute() or not path.exists():
        return None
    head = path.read_bytes()[:1000]
    if head.startswith(b"\x7fELF"):
        return path
    named = re.search(rb"(/\S+\.so[\w.]*)", head)
    return Path(named[1].decode()) if named else None
