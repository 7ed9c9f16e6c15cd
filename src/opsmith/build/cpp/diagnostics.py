"""What a C++ compiler says, in the author's own lines."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

from opsmith.build.cpp.source import CppSource
from opsmith.build.includes import includes_of

SHOWN = 3
"""How many errors a message quotes: those after them mostly follow from them."""

_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:) [`']?(?P<name>[^'`\n]+?)'?$", re.MULTILINE)
_LINE = re.compile(r"^(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?: +(?P<text>.*)$")


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """An error of the compiler: its text, and the author's line that it is about.

    Attributes:
        header: The header of the author's own that the line is in; None for one of the kernel's file.
    """

    text: str
    line: int
    column: int | None
    header: str | None = None

    def shown(self, source: CppSource) -> str:
        """Place, text, the line of source and a mark below the column."""
        column = "" if self.column is None else f":{self.column}"
        lines = [f"{self.header or source.path}:{self.line}{column}: {self.text}"]
        quoted = source.quoted(self.line) if self.header is None else quoted_from(self.header, self.line)
        if quoted.strip():
            lines.append(f"    {quoted}")
            if self.column is not None:
                indent = re.sub(r"[^\t]", " ", quoted[: self.column - 1])
                lines.append(f"    {indent}^")
        return "\n".join(lines)


def diagnostics(printed: str, source: CppSource) -> list[Diagnostic]:
    """The errors in what a compiler printed.

    One that is found in a file of others, or in what is generated, is told at the author's line from which
    the compiler came there, or else at the kernel. A brace that is never closed makes errors of all that is
    generated behind it: it is told at itself, and first.
    """
    found: list[Diagnostic] = []
    own, closes = own_headers(source), False
    last: tuple[int, int | None] | None = None
    for line in printed.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        mine = match["file"] == source.path
        place = int(match["line"]), None if match["column"] is None else int(match["column"])
        text = match["text"]
        header = match["file"] if match["file"] in own else None
        if re.match(r"(fatal )?error: ", text):
            at = place if mine or header else last or (source.at, None)
            # told once for all dtypes
            if (*at, header) not in {(each.line, each.column, each.header) for each in found}:
                found.append(Diagnostic(text.partition("error: ")[2], *at, header))
            last = None
            closes = re.search(r"error: expected '}'( at end of input)?$", text) is not None
        elif mine and closes and text == "note: to match this '{'":
            found.insert(0, Diagnostic("expected '}' that matches this '{'", *place))
        elif mine:
            last = place
    return found


def own_headers(source: CppSource) -> frozenset[str]:
    """The author's own headers, as compilers name them."""
    return frozenset(map(str, includes_of(source.text, source.folder)))


def quoted_from(header: str, line: int) -> str:
    """A line of a header as it is now, without its end."""
    linecache.checkcache(header)
    return linecache.getline(header, line).rstrip("\r\n")


def told(printed: str, source: CppSource) -> str:
    """The first errors, each with its place and line; all that was printed where none can be made out."""
    found = diagnostics(printed, source) or _undefined(printed, source)
    if not found:
        return printed.strip() or "it printed nothing"
    rest = len(found) - SHOWN
    shown = [each.shown(source) for each in found[:SHOWN]]
    return "\n".join([*shown, *([f"and {rest} more"] if rest > 0 else [])])


def _undefined(printed: str, source: CppSource) -> list[Diagnostic]:
    """What the linker found no definition of, each once, at the line of the text that names it last."""
    found = []
    for name in dict.fromkeys(match["name"] for match in _UNDEFINED.finditer(printed)):
        word = re.split(r"[(<]", name.rpartition("::")[2] or name)[0]
        lines = [
            number
            for number, line in enumerate(source.text.splitlines(), source.line)
            if re.search(rf"\b{re.escape(word)}\b", line)
        ]
        found.append(
            Diagnostic(
                f"nothing defines `{name}`, neither the source nor a library", [source.at, *lines][-1], None
            )
        )
    return found
