"""Find the source lines of addresses in a library with `addr2line` of GNU binutils."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opsmith.core.location import parsed

LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Line:
    """Line of source.

    Attributes:
        function: Name of the function.
        file: Path of the file, in the form that the compiler got.
        number: Number of the line, from 1.
    """

    function: str
    file: str
    number: int

    def is_of(self, file: str) -> bool:
        """Return True if the line is in this file; its path may be relative to the compiler's directory."""
        return self.file == file or self.file.endswith(f"/{file}")


def lines_at(library: Path, addresses: Sequence[int]) -> list[list[Line]]:
    """Return for each address its line, followed by the lines into which it was inlined.

    Empty if the library is missing or has no line numbers, or if there is no `addr2line`.

    Args:
        library: A library, or a program.
        addresses: Addresses in the file.
    """
    program = shutil.which("addr2line")
    found: list[list[Line]] = [[] for _ in addresses]
    if program is None or not addresses:
        return found
    command = [program, "-e", str(library), "-a", "-f", "-i", "-C", *map(hex, addresses)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return found
    at, function = -1, ""
    for line in done.stdout.splitlines():
        if line.startswith("0x"):
            at, function = at + 1, ""
        elif not function:
            function = line
        else:
            if (place := parsed(line.partition(" (discriminator")[0])) is not None:
                found[at].append(Line(function, *place))
            function = ""
    return found
