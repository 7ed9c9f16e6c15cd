"""Errors of C++ compilers and linkers at the author's lines, and the messages that quote these errors."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opsmith import errors
from opsmith.build.source_text import includes_of
from opsmith.kernels.cpp.source import CppSource

MAX_ERRORS = 3
"""Number of errors that a message quotes: later errors usually follow from the first errors."""
MAX_LINES, MAX_LENGTH = 20, 500
"""Number of lines that a message quotes from other output, and of characters in a line."""

_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:) [`']?(?P<name>[^'`\n]+?)'?$", re.MULTILINE)
_BY_MACRO = "note: in expansion of macro "
_LINE = re.compile(r"^(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?: +(?P<text>.*)$")


def compile_error(
    compiler: str, source: CppSource, operator: str, quoted: str, hint: str | None = None
) -> errors.CompileError:
    """Return the error for a kernel that a compiler refuses.

    Args:
        compiler: Name of the compiler.
        source: The author's source.
        operator: Name of the operator.
        quoted: See `quoted_errors`.
        hint: Advice; by default, to fix the first error first.
    """
    return errors.CompileError(
        f"{compiler} refuses the kernel",
        operator=operator,
        got="\n".join(f"    {line}" for line in quoted.splitlines()).lstrip(),
        where=source.given or source.where,
        hint=hint or "fix the first error; the later errors may follow from it",
    )


def changing_headers(source: CppSource, operator: str, attempts: int) -> errors.CompileError:
    """Return the error for headers that change while a compiler reads them.

    Args:
        source: The author's source.
        operator: Name of the operator.
        attempts: Number of attempts.
    """
    return errors.CompileError(
        "the headers of the kernel change while it is compiled",
        operator=operator,
        got=f"a different text in each of {attempts} attempts",
        where=source.where,
        hint="do not write to the headers during a build",
    )


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Error of a compiler, at one of the author's lines.

    Attributes:
        text: Text of the error.
        line: Line, from 1.
        column: Column, from 1.
        header: The author's header that contains the line; None for the kernel's file.
    """

    text: str
    line: int
    column: int | None
    header: str | None = None

    def quoted(self, source: CppSource) -> str:
        """Return location and text, the source line, and a mark below the column."""
        column = "" if self.column is None else f":{self.column}"
        lines = [f"{self.header or source.path}:{self.line}{column}: {self.text}"]
        quoted = source.quoted(self.line) if self.header is None else quoted_from(self.header, self.line)
        if quoted.strip():
            lines.append(f"    {quoted}")
            if self.column is not None:
                indent = re.sub(r"[^\t]", " ", quoted[: self.column - 1])
                lines.append(f"    {indent}^")
        return "\n".join(lines)


def diagnostics(printed: str, source: CppSource, headers: frozenset[str] = frozenset()) -> list[Diagnostic]:
    """Return the errors that a compiler printed, one for each location.

    An error in another file, or in generated code, is reported at the author's line that led there, such as
    the use of a macro. If there is no such line, it is reported at the kernel. An unclosed brace causes
    errors in all later generated code, so it is reported first.
    """
    found: list[Diagnostic] = []
    brace_missing = False
    last: tuple[int, int | None] | None = None
    elsewhere: Diagnostic | None = None  # an error in another file, to which a macro may have led
    for line in printed.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        in_source = match["file"] == source.path
        location = int(match["line"]), None if match["column"] is None else int(match["column"])
        text = match["text"]
        header = match["file"] if match["file"] in headers else None
        if re.match(r"(fatal )?error: ", text):
            if elsewhere is not None:
                add_diagnostic(found, elsewhere)
            at = location if in_source or header else last or (source.at, None)
            error = Diagnostic(_cut(text.partition("error: ")[2]), *at, header)
            elsewhere = None if in_source or header else error
            if elsewhere is None:
                add_diagnostic(found, error)
            last = None
            brace_missing = re.search(r"error: expected '}'( at end of input)?$", text) is not None
        elif elsewhere is not None and (in_source or header) and text.startswith(_BY_MACRO):
            add_diagnostic(found, Diagnostic(elsewhere.text, *location, header))
            elsewhere = None
        elif in_source and brace_missing and text == "note: to match this '{'":
            found.insert(0, Diagnostic("expected '}' that matches this '{'", *location))
        elif in_source:
            last = location
    if elsewhere is not None:
        add_diagnostic(found, elsewhere)
    return found


@dataclass(frozen=True, slots=True)
class NarrowIndex:
    """An index of 32 bits: the reason, `file:line`, and the tensor's names (empty for an unknown tensor)."""

    reason: str
    where: str
    tensors: frozenset[str]


def narrow_indices(
    found: Iterable[Diagnostic], functions: Sequence[tuple[CppSource, Sequence[str]]]
) -> list[NarrowIndex]:
    """Return the indices of 32 bits in a compiler's messages, except constant indices.

    Args:
        found: The messages of the compiler.
        functions: The functions that are called or launched, each with the names of the tensors it gets.
    """
    source, indices = functions[0][0], []
    passed = [
        (re.split(r"\W+", parameter)[-1], function.entry, name)
        for function, names in functions
        for parameter, name in zip(function.declared_parameters(), names, strict=False)
    ]
    hint = "declare its numbers as `int64_t`, or multiply as in `int64_t(i) * n`"
    for each in found:
        line = source.quoted(each.line) if each.header is None else quoted_from(each.header, each.line)
        base, index = _index_at(line, (each.column or 0) - 1)
        if "opsmith: 32 bits" in each.text and (not index or re.search(r"\b[A-Za-z_]", index)):
            reason = f"the index `{base + index or line.strip()}` has 32 bits: {hint}"
            given = [(entry, name) for parameter, entry, name in passed if parameter == base]
            named_so = re.findall(rf"(?:\w\s+|[>&]\s*){base}\s*[,)]", source.text)
            alone = each.header is None and len(named_so) <= len({entry for entry, _ in given})
            tensors = frozenset(name for _, name in given if alone)  # only if no other function uses the name
            indices.append(NarrowIndex(reason, f"{each.header or source.path}:{each.line}", tensors))
    return indices


def _index_at(line: str, at: int) -> tuple[str, str]:
    """Return the brackets with a bracket at this place, and the name before them; empty if there are none."""
    opened: list[int] = []
    for place, letter in enumerate(line):
        if letter in "([":
            opened.append(place)
        elif letter in ")]" and opened and at in (begin := opened.pop(), place):
            return re.findall(r"\w*", line[:begin].rstrip())[-2], line[begin : place + 1]
    return "", ""


def add_diagnostic(found: list[Diagnostic], new: Diagnostic) -> None:
    """Append an error unless its location has one already: every dtype of a template repeats the error."""
    if (new.line, new.column, new.header) not in {(each.line, each.column, each.header) for each in found}:
        found.append(new)


def own_headers(source: CppSource) -> frozenset[str]:
    """Return the author's headers, by the names that compilers print."""
    return frozenset(map(str, includes_of(source.text, source.folder)))


def quoted_from(header: str, line: int) -> str:
    """Return the current text of a header's line, without the newline."""
    linecache.checkcache(header)
    return linecache.getline(header, line).rstrip("\r\n")


def quoted_errors(printed: str, source: CppSource, headers: frozenset[str] = frozenset()) -> str:
    """Return the first errors that a C++ compiler or its linker printed, each with location and line.

    Args:
        printed: Output of the compiler or linker.
        source: The author's source.
        headers: The author's headers, by the names that compilers print.
    """
    return quote(diagnostics(printed, source, headers) or _undefined(printed, source), source, printed)


def quote(found: Sequence[Diagnostic], source: CppSource, printed: str) -> str:
    """Return the first of these errors, with location and line; the whole output if there are none."""
    if not found:
        lines = printed.strip().splitlines()
        return "\n".join(map(_cut, lines[:MAX_LINES])) or "it printed nothing"
    rest = len(found) - MAX_ERRORS
    quoted = [each.quoted(source) for each in found[:MAX_ERRORS]]
    return "\n".join([*quoted, *([f"and {rest} more"] if rest > 0 else [])])


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LENGTH else f"{line[:MAX_LENGTH]} ..."


def _undefined(printed: str, source: CppSource) -> list[Diagnostic]:
    """Return an error for each undefined name of the linker, at the last line of the text with this name."""
    found = []
    for name in dict.fromkeys(match["name"] for match in _UNDEFINED.finditer(printed)):
        word = re.split(r"[(<]", name.rpartition("::")[2] or name)[0]
        lines = [
            number
            for number, line in enumerate(source.text.split("\n"), source.line)
            if re.search(rf"\b{re.escape(word)}\b", line)
        ]
        text = f"`{name}` is defined neither in the source nor in a library"
        found.append(Diagnostic(text, [source.at, *lines][-1], None))
    return found
