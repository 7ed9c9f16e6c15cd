"""From an address in a library to lines of source, by `addr2line`, which comes with every g++ (binutils)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source.

    Attributes:
        function: What it is in.
        file: As the compiler was told it.
        number: From 1.
    """

    function: str
    file: str
    number: int

    def is_of(self, file: str) -> bool:
        """Whether it is of a file, which stands behind the compiler's own directory where it is no path."""
        return self.file == file or self.file.endswith(f"/{file}")


def lines_at(library: Path, addresses: Sequence[int]) -> list[list[Line]]:
    """For each address the line it is of, and behind it those that it was inlined into.

    Nothing where the library is gone or says nothing of lines, or where there is no `addr2line`.

    Args:
        library: A library, or a program.
        addresses: As they lie in the file.
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
        file, _, number = line.partition(" (discriminator")[0].rpartition(":")
        if line.startswith("0x"):
            at, function = at + 1, ""
        elif not function:
            function = line
        else:
            if number.isdigit() and int(number):
                found[at].append(Line(function, file, int(number)))
            function = ""
    return found
