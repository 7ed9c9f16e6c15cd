"""The source of a C++ kernel as its author wrote it: the text, where it stands, and which function it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from opsmith.build.includes import folder_of
from opsmith.build.text import Language, find_function

_FUNCTION = r"""
    (?P<template> template \s* < [^;{{}}]*? > \s* )?
    \b (?: [\w:]+ \s+ )* \b void \s+ {name} \s* \(
"""
_SIZES = re.compile(
    r"(template\s*<[^;{}]*?>\s*)?\b(?:Shape|std\s*::\s*array\s*<\s*Shape\s*,\s*\w+\s*>)\s+sizes\s*\("
)


@dataclass(frozen=True, slots=True)
class CppSource:
    """Text of a kernel.

    Attributes:
        text: What the author wrote.
        entry: Name of the function in it that is the kernel.
        template: Whether that is a template over the dtype.
        path: The file that the text stands in; `<cpp of demo::linear>` where that is not known.
        line: The line of that file on which the text begins, from 1.
        at: The line of that file on which the function is named.
        sizes: What tells the sizes of the results: `function`, a `template` of the name `sizes`, or nothing.
        folder: Where headers are looked for that it includes between quotes; None where that is not known.
    """

    text: str
    entry: str
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


def cpp_source(
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
    found = find_function(CPP, operator, text=cpp, file=cpp_file, entry=entry, declared=declared)
    template = found.match["template"] is not None
    told = _SIZES.search(found.bare)
    sizes: Literal["function", "template"] | None = None
    if told is not None:
        sizes = "template" if told[1] is not None else "function"
    folder = folder_of(cpp_file, declared)
    return CppSource(found.text, found.name, template, found.path, found.line, found.at, sizes, folder)


def _functions(bare: str) -> str:
    names = re.findall(r"\bvoid\s+(\w+)\s*\(", bare)
    return f"functions that return void: {', '.join(names)}" if names else "no function that returns void"


CPP = Language(
    "C++",
    "cpp",
    "function",
    _FUNCTION,
    "`void {name}(...)`, whose parameters are the arguments and then the results",
    _functions,
)
