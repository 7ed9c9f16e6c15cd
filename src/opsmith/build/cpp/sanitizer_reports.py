"""What AddressSanitizer and UndefinedBehaviorSanitizer write, read: kinds, addresses, and lines of source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from opsmith.build.cpp.compiling import LIBRARY
from opsmith.build.symbols import Line, lines_at

_BEGIN = re.compile(r"^==\d+==ERROR: AddressSanitizer:? (?P<words>.*)$", re.MULTILINE)
_UNDEFINED = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+):(?P<column>\d+): runtime error: (?P<words>.*)$", re.MULTILINE
)
_FRAME = re.compile(r"^ +#\d+ 0x[0-9a-f]+ .*?\((?P<library>/[^()]*)\+(?P<offset>0x[0-9a-f]+)\)", re.MULTILINE)
_ACCESS = re.compile(
    r"^(?:.*caused by a )?(?P<way>READ|WRITE)(?: of size (?P<size>\d+)| memory access)", re.MULTILINE
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


@dataclass(frozen=True, slots=True)
class SanitizerReport:
    """One thing that a sanitizer found.

    Attributes:
        kind: AddressSanitizer's word for it; `undefined` from the other.
        words: What it says, in a line.
        lines: The lines of source that it happened in, the innermost first; of libraries that are known.
        way: `READ` or `WRITE`; empty where it says neither.
        size: Bytes that were read or written; 0 where it does not say.
        address: Of what was read or written; None where it does not say.
        region: Start of the piece of memory that it is beside or in, the bytes between, their size, and the
            side: `after`, `before` or `inside`.
        variable: The variable whose memory it is beside, on the stack or global; empty for none.
    """

    kind: str
    words: str
    lines: tuple[Line, ...]
    way: str = ""
    size: int = 0
    address: int | None = None
    region: tuple[int, int, int, str] | None = None
    variable: str = ""


def reports(text: str) -> list[SanitizerReport]:
    """Every report in what a sanitizer wrote, but those in which no kernel had a part.

    Args:
        text: What it wrote, with frames as `(library+offset)`.
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
        words = _NUMBER.sub("", undefined["words"])  # another one in each process
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
        access["way"] if access else "",
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
    """The lines of frames; in all but the one on top the address is that behind a call."""
    by_library: Mapping[str, list[int]] = {library: [] for library, _ in frames}
    for at, (library, offset) in enumerate(frames):
        by_library[library].append(offset if top and at == 0 else offset - 1)
    return [
        line
        for library, offsets in by_library.items()
        for chain in lines_at(Path(library), offsets)
        for line in chain
    ]
