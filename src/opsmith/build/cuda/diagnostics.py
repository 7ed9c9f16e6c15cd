"""What NVRTC says, in the author's own lines."""

from __future__ import annotations

import re

from opsmith.build.cpp.diagnostics import SHOWN, Diagnostic, own_headers
from opsmith.build.cuda.source import CudaSource

_LINE = re.compile(
    r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<kind>[a-z -]*error|warning|note)[^:]*: (?P<text>.*)$"
)
_INSIDE = re.compile(r'(?:at|of) line (?P<line>\d+)(?: of (?P<file>"?.+?"?))?\s*$')
MARGIN = 2
"""NVRTC quotes a line of the source with so many spaces before it."""


def diagnostics(log: str, source: CudaSource) -> list[Diagnostic]:
    """The errors in what NVRTC printed.

    One that is found in a file of others, or in what is generated, is told at the author's line from which
    the compiler came there, or else at the kernel.
    """
    found: list[Diagnostic] = []
    own = own_headers(source)
    lines = log.splitlines()
    for at, line in enumerate(lines):
        match = _LINE.match(line)
        if match is None or not match["kind"].endswith("error"):
            continue
        rest = _rest(lines[at + 1 :])
        header = match["file"] if match["file"] in own else None
        if match["file"] == source.path or header is not None:
            place = int(match["line"]), _column(rest)
        else:
            place = _came_from(rest, source), None
        # told once for all dtypes
        if (*place, header) not in {(each.line, each.column, each.header) for each in found}:
            found.append(Diagnostic(match["text"], *place, header))
    return found


def _rest(lines: list[str]) -> list[str]:
    """What belongs to an error: all up to the next one."""
    ends = (at for at, line in enumerate(lines) if _LINE.match(line))
    return lines[: next(ends, len(lines))]


def _column(rest: list[str]) -> int | None:
    """Where the mark below the quoted line stands."""
    if len(rest) > 1 and rest[1].strip() == "^":
        return rest[1].index("^") - MARGIN + 1
    return None


def _came_from(rest: list[str], source: CudaSource) -> int:
    """The author's line in the trace of an instantiation, or else the kernel's."""
    for line in rest:
        match = _INSIDE.search(line)
        if match is not None and (match["file"] or "").strip('"') == source.path:
            return int(match["line"])
    return source.at


def told(log: str, source: CudaSource) -> str:
    """The first errors, each with its place and line; all that was printed where none can be made out."""
    found = diagnostics(log, source)
    if not found:
        return log.strip() or "it printed nothing"
    rest = len(found) - SHOWN
    shown = [each.shown(source) for each in found[:SHOWN]]
    return "\n".join([*shown, *([f"and {rest} more"] if rest > 0 else [])])
