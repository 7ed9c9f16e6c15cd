"""C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer: flags, libraries, reports."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch

from opsmith import errors
from opsmith.build.symbols import Line, lines_at
from opsmith.build.toolchain import FLAGS, Toolchain, find_toolchain
from opsmith.kernels.common.dtypes import DEFAULT_DTYPES
from opsmith.kernels.cpp.codegen import kernel_code
from opsmith.kernels.cpp.compiler import HEADER, building_with, kernel_flags
from opsmith.kernels.cpp.source import CppSource
from opsmith.kernels.runtime.loading import LIBRARY

Fill = Literal["pattern", "zero"]
"""Initial content of variables. A kernel is wrong if its results depend on this content."""

_BASE_FLAGS = [flag for flag in FLAGS if not flag.startswith(("-O", "-g"))]
_COMPARABLE = ("-Og", "-ffp-contract=off")
"""Flags of both builds, whose results are compared bit by bit."""
_SANITIZING = (
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fsanitize-recover=address,undefined",
    "-fno-sanitize=nonnull-attribute",  # allows `memcpy` of 0 bytes from a null pointer
    "-fno-sanitize=object-size",  # AddressSanitizer detects the same accesses
    # These reduce the compile time of many unrolled loops to a third.
    "-fno-var-tracking",
    *("--param", "asan-instrumentation-with-call-threshold=0"),
)

LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so.6")
_BEGIN = re.compile(r"^==\d+==ERROR: AddressSanitizer:? (?P<words>.*)$", re.MULTILINE)
_UNDEFINED = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+):(?P<column>\d+): runtime error: (?P<words>.*)$", re.MULTILINE
)
_FRAME = re.compile(r"^ +#\d+ 0x[0-9a-f]+ .*?\((?P<library>/[^()]*)\+(?P<offset>0x[0-9a-f]+)\)", re.MULTILINE)
_ACCESS = re.compile(
    r"^(?:.*caused by a )?(?P<access>READ|WRITE)(?: of size (?P<size>\d+)| memory access)", re.MULTILINE
)
_REGION = re.compile(
    r"is located (?P<bytes>\d+) bytes (?P<side>to the right of|to the left of|after|before|inside of) "
    r"(?P<size>\d+)-byte region \[(?P<start>0x[0-9a-f]+),"
)
_VARIABLE = re.compile(r"'(?P<name>[^']+)'(?: \(line (?P<line>\d+)\))? <== ")
_GLOBAL = re.compile(r"(?:to the \w+ of|after|before|inside of) global variable '(?P<name>[^']+)'")
_ADDRESS = re.compile(r"(?:on|for) (?:unknown )?address (?P<address>0x[0-9a-f]+)")
_NUMBER = re.compile(r" 0x[0-9a-f]+")
_SIDES = {"to the right of": "after", "to the left of": "before", "inside of": "inside"}
_WARNING = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+):\d+: warning: (?P<words>.*) \[-W(?:maybe-)?uninitialized\]$", re.MULTILINE
)


@contextmanager
def sanitized(fill: Fill) -> Iterator[None]:
    """Context manager in which kernels are built for a check under sanitizers.

    Args:
        fill: Initial content of variables. The build with zeros makes the same calls as the other build, and
            only its results are used. It has no sanitizers, which take most of the compile time.
    """
    sanitizing = _SANITIZING if fill == "pattern" else ()
    with building_with(_BASE_FLAGS, (*_COMPARABLE, *sanitizing, f"-ftrivial-auto-var-init={fill}")):
        yield


@cache
def preloaded(toolchain: Toolchain) -> tuple[Path, ...]:
    """Return the libraries that a process must preload: AddressSanitizer's and the standard library of C++.

    AddressSanitizer needs the standard library to intercept exceptions.

    Raises:
        ToolchainError: If the compiler lacks a library of its sanitizers.
    """
    folder = HEADER.parent
    found = [_library(toolchain, name, folder) for name in LIBRARIES]
    tried = toolchain.run(["-ftrivial-auto-var-init=zero", "-fsyntax-only", "-x", "c++", HEADER.name], folder)
    missing = [name for name, path in zip(LIBRARIES, found, strict=True) if path is None]
    if missing or tried.status:
        program = " ".join(toolchain.command)
        got = f"without {' and '.join(missing)}" if missing else tried.printed.strip()
        raise errors.ToolchainError(
            "the C++ compiler has no sanitizers for a sanitised check",
            expected="g++ 12 or later, with its libraries libasan.so and libubsan.so",
            got=f"{program}: {got}",
            hint="install g++ with its sanitizers: on Debian or Ubuntu with `apt-get install g++`, on Fedora "
            "with `dnf install gcc-c++ libasan libubsan`; if CXX names clang, name g++ instead",
        )
    return tuple(path for path in (found[0], found[2]) if path is not None)


def _library(toolchain: Toolchain, name: str, folder: Path) -> Path | None:
    """Return the path of a library, also if it is replaced by a linker script, as on Fedora."""
    path = Path(toolchain.run([f"-print-file-name={name}"], folder).printed.strip())
    if not path.is_absolute() or not path.exists():
        return None
    head = path.read_bytes()[:1000]
    if head.startswith(b"\x7fELF"):
        return path
    named = re.search(rb"(/\S+\.so[\w.]*)", head)
    return Path(named[1].decode()) if named else None


@dataclass(frozen=True, slots=True)
class SanitizerReport:
    """Report of one finding of a sanitizer.

    Attributes:
        kind: AddressSanitizer's name of the error; `undefined` for UndefinedBehaviorSanitizer.
        text: Text of the error, in one line.
        lines: Source lines of the stack, the innermost first.
        access: `READ` or `WRITE`; empty if it is unknown.
        size: Bytes that were read or written; 0 if it is unknown.
        address: Address of the access; None if it is unknown.
        region: Nearest memory region: its start, its distance in bytes, its size, and the side of it on which
            the access is: `after`, `before` or `inside`.
        variable: Nearest variable, on the stack or global; empty if there is none.
    """

    kind: str
    text: str
    lines: tuple[Line, ...]
    access: str = ""
    size: int = 0
    address: int | None = None
    region: tuple[int, int, int, str] | None = None
    variable: str = ""


def reports(text: str) -> list[SanitizerReport]:
    """Return the reports of the sanitizers that have a kernel in their stack.

    Args:
        text: Output of the sanitizers, with frames in the form `(library+offset)`.
    """
    begins = sorted(match.start() for match in (*_BEGIN.finditer(text), *_UNDEFINED.finditer(text)))
    pieces = [text[start:end] for start, end in pairwise((*begins, len(text)))]
    return [found for piece in pieces if (found := _report(piece)) is not None]


def _report(piece: str) -> SanitizerReport | None:
    stack = piece.partition("\n\n")[0]
    frames = [(match["library"], int(match["offset"], 16)) for match in _FRAME.finditer(stack)]
    kernels = [(library, offset) for library, offset in frames if Path(library).name == LIBRARY]
    if not kernels:
        return None
    lines = _lines(kernels, top=frames[0] in kernels)
    undefined = _UNDEFINED.match(piece)
    if undefined is not None:
        exact = Line("", undefined["file"], int(undefined["line"]))
        if exact.file not in {line.file for line in lines}:
            lines = [exact, *lines]
        words = _NUMBER.sub("", undefined["words"])  # addresses differ between processes
        return SanitizerReport("undefined", words, tuple(lines))
    begin = _BEGIN.match(piece)
    assert begin is not None
    access, region, address = _ACCESS.search(piece), _REGION.search(piece), _ADDRESS.search(begin["words"])
    variable = _VARIABLE.search(piece) or _GLOBAL.search(piece)
    words = begin["words"]
    kind = "double-free" if "double-free" in words else words.split()[0].rstrip(":")
    return SanitizerReport(
        kind,
        f"AddressSanitizer: {kind}",
        tuple(lines),
        access["access"] if access else "",
        int(access["size"] or 0) if access else 0,
        int(address["address"], 16) if address else None,
        None
        if region is None
        else (
            int(region["start"], 16),
            int(region["bytes"]),
            int(region["size"]),
            _SIDES.get(region["side"], region["side"]),
        ),
        variable["name"] if variable else "",
    )


def _lines(frames: Sequence[tuple[str, int]], *, top: bool) -> list[Line]:
    """Return the lines of frames. Except in the top frame, the address is after the call."""
    by_library: Mapping[str, list[int]] = {library: [] for library, _ in frames}
    for at, (library, offset) in enumerate(frames):
        by_library[library].append(offset if top and at == 0 else offset - 1)
    return [
        line
        for library, offsets in by_library.items()
        for chain in lines_at(Path(library), offsets)
        for line in chain
    ]


def unset_lines(
    source: CppSource, operator: str, dtypes: Sequence[torch.dtype] | None
) -> list[tuple[int, str]]:
    """Return the lines of a kernel that use a variable which may be uninitialized, with the warnings.

    Args:
        source: The kernel.
        operator: Name of the operator.
        dtypes: The dtypes for which a template is instantiated; None for the default dtypes.

    Raises:
        ToolchainError: See `compile_kernel`.
    """
    instances = tuple(dtypes or DEFAULT_DTYPES) if source.template else ()
    with tempfile.TemporaryDirectory(prefix="opsmith-") as name:
        folder = Path(name)
        (folder / HEADER.name).write_bytes(HEADER.read_bytes())
        (folder / "kernel.cpp").write_text(kernel_code(source, operator, instances), encoding="utf-8")
        options = ["-Wuninitialized", "-Wmaybe-uninitialized", "-S", "-o", "kernel.s"]
        printed = find_toolchain().run([*kernel_flags(source), *options, "kernel.cpp"], folder).printed
    found = {
        (int(match["line"]), match["words"].replace("\N{LEFT SINGLE QUOTATION MARK}", "`"))
        for match in _WARNING.finditer(printed)
        if match["file"] == source.path
    }
    return sorted(found)
