"""The source of a C++ kernel as its author wrote it: the text, where it stands, and which function it is."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

from opsmith import errors
from opsmith.build.cpp.includes import folder_of

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)

_SIZES = re.compile(
    r"(template\s*<[^;{}]*?>\s*)?\b(?:Shape|std\s*::\s*array\s*<\s*Shape\s*,\s*\w+\s*>)\s+sizes\s*\("
)


@dataclass(frozen=True, slots=True)
class CppSource:
    """Text of a kernel.

    Attributes:
        text: What the author wrote.
        function: Name of the function in it that is the kernel.
        template: Whether that is a template over the dtype.
        path: The file that the text stands in; `<cpp of demo::linear>` where that is not known.
        line: The line of that file on which the text begins, from 1.
        at: The line of that file on which the function is named.
        sizes: What tells the sizes of the results: `function`, a `template` of the name `sizes`, or nothing.
        folder: Where headers are looked for that it includes between quotes; None where that is not known.
    """

    text: str
    function: str
    template: bool
    path: str
    line: int
    at: int
    sizes: Literal["function", "template"] | None = None
    folder: str | None = None

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        return f"{self.path}:{self.at}"

    def quoted(self, line: int) -> str:
        """A line of the file that the text stands in; empty for one that is not of the text."""
        lines = self.text.splitlines()
        at = line - self.line
        return lines[at] if 0 <= at < len(lines) else ""


def source_of(
    operator: str,
    *,
    cpp: str | None,
    cpp_file: str | PathLike[str] | None,
    entry: str | None,
    declared: str | None,
) -> CppSource:
    """Find out about a source.

    Args:
        operator: Name of the operator, `namespace::name`.
        cpp: The text itself.
        cpp_file: Or a file; a relative path is beside the file that declares the kernel.
        entry: Name of the kernel in it; by default the operator's own, without its namespace.
        declared: The file in which the kernel is declared.

    Raises:
        KernelSourceError: If there is no such file, or no such function in it.
    """
    text, place, line = text_of(operator, "C++", "cpp", cpp, cpp_file, declared)
    name = entry or operator.partition("::")[2]
    bare = without_comments(text)
    found = re.search(rf"(template\s*<[^;{{}}]*?>\s*)?\b(?:[\w:]+\s+)*\bvoid\s+{re.escape(name)}\s*\(", bare)
    if found is None:
        raise errors.KernelSourceError(
            f"the C++ source has no function `{name}`",
            operator=operator,
            argument="entry",
            expected=f"`void {name}(...)`, whose parameters are the arguments and then the results",
            got=_functions(bare),
            where=f"{place}:{line}",
            mend=f"name the kernel `{name}`, or say which function it is with `entry=`",
        )
    at = line + bare.count("\n", 0, found.end())
    told = _SIZES.search(bare)
    sizes: Literal["function", "template"] | None = None
    if told is not None:
        sizes = "template" if told[1] is not None else "function"
    return CppSource(text, name, found[1] is not None, place, line, at, sizes, folder_of(cpp_file, declared))


def text_of(
    operator: str,
    language: str,
    argument: str,
    text: str | None,
    file: str | PathLike[str] | None,
    declared: str | None,
) -> tuple[str, str, int]:
    """The text of a kernel, the file that it stands in, and the line on which it begins there.

    Args:
        operator: Name of the operator.
        language: What it is written in, for messages.
        argument: The argument that gives the text; with `_file` behind it, that which names a file.
        text: The text, or None.
        file: The file, or None.
        declared: The file in which the kernel is declared.

    Raises:
        KernelSourceError: If there is no such file, or the text is none.
    """
    if file is None:
        if not isinstance(text, str):
            raise errors.KernelSourceError(
                f"the text of a {language} kernel is none",
                operator=operator,
                argument=argument,
                expected="a str, which holds the source",
                got=repr(text),
                mend=f"write `{argument}_file=` where it is the path of a file",
            )
        return text, *_place_of(text, declared, f"<{argument} of {operator}>")
    path = Path(file)
    if not path.is_absolute() and declared is not None and Path(declared).exists():
        path = Path(declared).parent / path
    try:
        return path.read_text(encoding="utf-8"), str(path), 1
    except (OSError, UnicodeDecodeError) as error:
        raise errors.KernelSourceError(
            f"the file of a {language} kernel cannot be read",
            operator=operator,
            argument=f"{argument}_file",
            expected=f"a file of {language} in UTF-8; a relative path is beside the file that declares it",
            got=f"{path}: {error}",
            mend=f"give the path of the file, or its text as `{argument}=`",
        ) from error


def without_comments(text: str) -> str:
    """The text with spaces in the place of comments and strings, in the same lines."""
    return _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _functions(bare: str) -> str:
    names = re.findall(r"\bvoid\s+(\w+)\s*\(", bare)
    return f"functions that return void: {', '.join(names)}" if names else "no function that returns void"


def _place_of(text: str, declared: str | None, otherwise: str) -> tuple[str, int]:
    """The file and line at which a text stands as a literal: errors name lines that its author sees."""
    if declared is not None and text:
        whole = "".join(linecache.getlines(declared))
        before, found, _ = whole.partition(text)
        if found:
            return declared, before.count("\n") + 1
    return otherwise, 1
