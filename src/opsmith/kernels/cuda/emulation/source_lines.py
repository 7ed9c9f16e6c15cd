"""Lines of a kernel's source, by program counters of the library that was compiled from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from opsmith.build.symbols import Line, lines_at
from opsmith.kernels.cpp.diagnostics import own_headers, quoted_from
from opsmith.kernels.cuda.source import CudaSource


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Line of the author's source.

    Attributes:
        where: `file:line`.
        text: Its text; empty if it is unknown.
        file: The file.
        number: Number of the line, from 1.
    """

    where: str
    text: str
    file: str
    number: int


class SourceLines:
    """Lines of a kernel's source.

    Args:
        source: The kernel.
        library: The library that was compiled from it.
        counters: Program counters, as offsets in the library.
    """

    def __init__(self, source: CudaSource, library: Path, counters: Iterable[int]) -> None:
        self.source, self.headers = source, own_headers(source)
        ordered = sorted({*counters} - {0})
        self.chains = dict(zip(ordered, lines_at(library, ordered), strict=True))

    def at(self, counter: int, file: bytes | None = None, number: int = 0) -> SourceLine:
        """Return the author's line of a program counter, or of a file and line that the kernel passed."""
        chain = list(self.chains.get(counter, ()))
        if file is not None and number:
            chain.insert(0, Line("", file.decode(errors="replace"), number))
        for line in chain:
            if line.is_of(self.source.path):
                text = self.source.quoted(line.number).strip()
                return SourceLine(f"{self.source.path}:{line.number}", text, self.source.path, line.number)
            if line.file in self.headers or Path(line.file).resolve().as_posix() in self.headers:
                text = quoted_from(line.file, line.number).strip()
                return SourceLine(f"{line.file}:{line.number}", text, line.file, line.number)
        return SourceLine(self.source.where, "", self.source.path, self.source.at)
