"""Source of a C++ kernel: its text, its location, and the kernel's function."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

from opsmith import errors
from opsmith.build.compiler_options import NO_OPTIONS, CompilerOptions
from opsmith.build.source_text import (
    SourceLanguage,
    declaration_of,
    find_function,
    folder_of,
    includes_of,
    without_comments,
)

_FUNCTION = r"""
    (?P<template> template \s* < [^;{{}}]*? > \s* )?
    \b (?: [\w:]+ \s+ )* \b void \s+ {name} \s* \(
"""
_SIZES = r"""
    (?P<template> template \s* < [^;{{}}]*? > \s* )?
    \b (?: Shape | std\s*::\s*array\s*<\s*Shape\s*,\s*\w+\s*> ) \s+ {name} \s* \(
"""


@dataclass(frozen=True, slots=True)
class CppSource:
    """Source of a C++ kernel.

    Attributes:
        text: Text of the author.
        entry: Name of the kernel's function.
        template: True if the function is a template over the dtype.
        path: File of the text; `<cpp of demo::linear>` if it is unknown.
        line: First line of the text in the file, from 1.
        at: Line of the file with the function's name.
        sizes: Kind of the function `sizes`, which computes the results' sizes; None if there is none.
        folder: Folder of headers that it includes with quotes; None if it is unknown.
        options: Options for the compiler and the linker.
        given: If no file contains the text, `file:line` of the call that passes it; else None.
    """

    text: str
    entry: str
    template: bool
    path: str
    line: int
    at: int
    sizes: Literal["function", "template"] | None = None
    folder: str | None = None
    options: CompilerOptions = NO_OPTIONS
    given: str | None = None

    def placed(self, place: str | None) -> Self:
        """Return the source, with the place of its declaration if no file contains its text."""
        return self if place is None or not self.path.startswith("<") else replace(self, given=place)

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        return f"{self.path}:{self.at}"

    @property
    def over_dtype(self) -> bool:
        """True if the function is a template over the dtype."""
        return self.template

    def authored(self, package: Path | None) -> dict[str, Any]:
        """Return the parts that the author wrote, by name, without the location of files.

        Args:
            package: Folder of the package; all headers in it belong to the author.
        """
        inside = [
            each
            for each in self.options.include_dirs
            if package and Path(each).resolve().is_relative_to(package)
        ]
        headers = includes_of(self.text, self.folder, inside)
        return {
            "text": self.text,
            "entry": self.entry,
            "headers": {
                Path(os.path.relpath(path, self.folder or os.curdir)).as_posix(): text
                for path, text in headers.items()
            },
            "flags": self.options.portable_flags,
            "libraries": [os.path.basename(each) for each in self.options.libraries],
        }

    def declared_parameters(self) -> list[str]:
        """Return the parameters of the function, as they are written."""
        text = "\n".join(without_comments(self.text).split("\n")[self.at - self.line :])
        found = re.search(rf"\b{self.entry}\s*\(((?:[^()]|\([^()]*\))*)\)", text)
        parts = re.split(r",(?![^<>]*>)", found[1]) if found else []
        return [" ".join(each.split()) for each in parts]

    def quoted(self, line: int) -> str:
        """Return a line of the file; empty for a line outside of the text."""
        lines = self.text.split("\n")  # unlike `splitlines`, keep form feeds
        at = line - self.line
        return lines[at] if 0 <= at < len(lines) else ""


def cpp_source(
    operator: str,
    *,
    cpp: str | None,
    cpp_file: str | PathLike[str] | None,
    entry: str | None,
    declared: str | None,
    options: CompilerOptions = NO_OPTIONS,
) -> CppSource:
    """Read the source of a C++ kernel.

    Args:
        operator: Name of the operator, `namespace::name`.
        cpp: Text of the source.
        cpp_file: File of the source; a relative path starts at the folder of the declaring file.
        entry: Name of the function; by default the operator's name without its namespace.
        declared: File that declares the kernel.
        options: Options for the compiler and the linker.

    Raises:
        KernelSourceError: If there is no such file, or it has no such function.
    """
    found = find_function(CPP, operator, text=cpp, file=cpp_file, entry=entry, declared=declared)
    template = found.match["template"] is not None
    sizes: Literal["function", "template"] | None = None
    sizes_function = declaration_of(_SIZES, "sizes", found.bare)
    if sizes_function is not None:
        sizes = "template" if sizes_function["template"] is not None else "function"
    folder = folder_of(cpp_file, declared)
    return CppSource(
        found.text, found.name, template, found.path, found.line, found.at, sizes, folder, options
    )


def _functions(bare: str) -> str:
    names = re.findall(r"\bvoid\s+(\w+)\s*\(", bare)
    return f"functions that return void: {', '.join(names)}" if names else "no function that returns void"


CPP = SourceLanguage(
    "C++",
    "cpp",
    "function",
    _FUNCTION,
    "`void {name}(...)`, whose parameters are the arguments and then the results",
    _functions,
)


def no_template(source: CppSource, language: str, returns: str) -> errors.KernelDtypeError:
    """Return the error for dtypes of a function that is not a template.

    Args:
        source: The source.
        language: Name of the language.
        returns: Return type of such a function, with its specifiers.
    """
    return errors.KernelDtypeError(
        f"dtypes are given for a {language} function that is not a template over a type",
        argument="dtypes",
        expected="`template <class T>` before the function",
        got=f"`{returns} {source.entry}(...)`",
        where=source.where,
        hint="leave `dtypes=` out: the views in the function's parameters have dtypes",
    )
