"""Text of a kernel in C++ or CUDA C++: its function, its position in a file, and its headers."""

from __future__ import annotations

import functools
import hashlib
import linecache
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from opsmith import errors

# Patterns as texts, which `re` compiles at their first use and caches: a declaration needs only the first.
_COMMENT = r'(?s://[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*")'
_DIRECTIVE = r"(?m:^[ \t]*(?:#|%:).*$)"
_DEFINED_FILE = r"\s*(?:#|%:)\s*define\s+(?P<name>\w+)\s+[\"<]"
_COMPUTED_INCLUDE = r"\s*(?:#|%:)\s*(?:include|import|include_next)\b\s*(?P<name>\w.*)"
_NAMED_FILE = r'["<]([^"<>\n\0]+)[">]'
_OWN_INCLUDE = r"(?s:(?:#|%:)(?:\s|\\\n|/\*.*?\*/)*(?:include|import|include_next)\b(?!\s*<)|__has_include)"


@dataclass(frozen=True, slots=True)
class SourceLanguage:
    """Language of a kernel's source.

    Attributes:
        name: Name of the language, for messages.
        argument: Argument of `op.kernel` for the text; with the suffix `_file`, the argument for a file.
        function: Word for the kernel's function, for messages.
        pattern: Regular expression of the function, with `{name}` for its name.
        expected: Declaration of the function with `{name}`, for messages.
        others: Describes the functions of a text, for messages.
    """

    name: str
    argument: str
    function: str
    pattern: str
    expected: str
    others: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class FoundFunction:
    """Function that was found in a text.

    Attributes:
        text: The whole text.
        bare: The text without comments and strings.
        name: Name of the function.
        path: File of the text.
        line: Line of the file at which the text begins, from 1. at: Line of the file that names the function.
        match: Match of the language's pattern.
    """

    text: str
    bare: str
    name: str
    path: str
    line: int
    at: int
    match: re.Match[str]


def find_function(
    language: SourceLanguage,
    operator: str,
    *,
    text: str | None,
    file: str | PathLike[str] | None,
    entry: str | None,
    declared: str | None,
) -> FoundFunction:
    """Find the kernel's function in a text; see `find_functions`."""
    (found,) = find_functions(language, operator, text=text, file=file, entries=[entry], declared=declared)
    return found


def find_functions(
    language: SourceLanguage,
    operator: str,
    *,
    text: str | None,
    file: str | PathLike[str] | None,
    entries: Sequence[str | None],
    declared: str | None,
) -> list[FoundFunction]:
    """Find the kernel's functions in a text.

    Args:
        language: Language of the text.
        operator: Name of the operator, `namespace::name`.
        text: Text of the source.
        file: File of the source; a relative path is relative to the folder of the file that declares the
            kernel. entries: Names of the functions; None for the operator's name without its namespace.
        declared: File that declares the kernel.

    Raises:
        KernelSourceError: If there is no such file, or no such function in it.
    """
    whole, path, line = _text_of(language, operator, text, file, declared)
    bare = without_comments(whole)
    found = []
    for entry in entries:
        name = entry or operator.partition("::")[2]
        match = declaration_of(language.pattern, name, bare)
        if match is None:
            there = re.search(rf"\b{re.escape(name)}\s*\(", bare) is not None
            advice = f"declare `{name}` in the expected form" if there else f"name the kernel `{name}`"
            raise errors.KernelSourceError(
                f"the {language.name} source has no {language.function} `{name}`",
                argument="entry",
                expected=language.expected.format(name=name),
                got=language.others(bare),
                where=f"{path}:{line}",
                hint=f"{advice}, or name the kernel's function in `entry=`",
            )
        at = line + bare.count("\n", 0, match.end())
        found.append(FoundFunction(whole, bare, name, path, line, at, match))
    return found


def declaration_of(pattern: str, name: str, bare: str) -> re.Match[str] | None:
    r"""Match the pattern of a function; None if the text does not have it.

    Lines that end with `;` or a brace are seldom part of a match. So the text after such a line, up to the
    name, is searched first. The pattern for this search fits all functions, and is compiled once.

    Args:
        pattern: Verbose regular expression, with `{name}` for the name, and `(` at its end.
        name: Name of the function.
        bare: Text without comments and strings.

    Example:
        >>> declaration_of(r"int \s+ {name} \s* \(", "size", "int other(); int size(int a)").start()
        13
    """
    every = re.compile(pattern.format(name=r"(?P<name>\w+)"), re.VERBOSE)
    opened, at, called = re.compile(r"\s*\("), bare.find(name), False
    while at >= 0:
        inside = bare[max(at - 1, 0) : at]  # part of a longer name, such as `same_sizes`
        parenthesis = None if inside.isalnum() or inside == "_" else opened.match(bare, at + len(name))
        if parenthesis is not None:
            called = True
            begin = 1 + max(bare.rfind(f"{each}\n", 0, at) for each in ";{}")
            for match in every.finditer(bare, begin, parenthesis.end()):
                if match["name"] == name:
                    return match
        at = bare.find(name, at + len(name))
    if not called:
        return None
    return re.search(pattern.format(name=re.escape(name)), bare, re.VERBOSE)


def _text_of(
    language: SourceLanguage,
    operator: str,
    text: str | None,
    file: str | PathLike[str] | None,
    declared: str | None,
) -> tuple[str, str, int]:
    """Return the text, its file, and the line of the file on which it begins."""
    if file is None:
        if not isinstance(text, str):
            raise errors.KernelSourceError(
                f"the text of a {language.name} kernel is not a str",
                argument=language.argument,
                expected="a str with the source",
                got=repr(text),
                hint=f"for the path of a file write `{language.argument}_file=`",
            )
        _refuse_surrogates(language, text)
        return text, *_location_of(text, declared, f"<{language.argument} of {operator}>")
    path = file_of(file, declared)
    try:
        return path.read_text(encoding="utf-8").removeprefix("\ufeff"), _visible(path), 1
    except (OSError, ValueError) as error:  # ValueError if it is not UTF-8, or its name has a zero byte
        raise errors.KernelSourceError(
            f"the file of a {language.name} kernel cannot be read",
            argument=f"{language.argument}_file",
            expected=f"a file of {language.name} in UTF-8; a relative path is relative to the file that "
            f"declares it",
            got=f"{path}: {error}",
            hint=f"give the path of the file, or its text as `{language.argument}=`",
        ) from error


def file_of(file: str | PathLike[str], declared: str | None) -> Path:
    """Return the absolute path of a kernel's file, which stays valid if the current directory changes.

    Args:
        file: Path of the file. A relative path is relative to the folder of the file that declares the
            kernel. If no file declares it, as in a notebook, it is relative to the current directory.
        declared: File that declares the kernel.

    Raises:
        KernelSourceError: If the declaring file is in an archive.
    """
    path = file if isinstance(file, Path) else Path(file)
    if path.is_absolute() or declared is None:
        return path.absolute()
    if os.path.exists(declared):
        return Path(os.path.dirname(declared), path).absolute()
    archive = next(filter(Path.is_file, Path(declared).parents), None)
    if archive is not None:
        raise errors.KernelSourceError(
            "a kernel's file is in an archive, where a compiler cannot read it",
            expected="a package that is installed in a folder",
            got=f"{os.fspath(file)}, in {archive}",
            hint="unpack the archive, or install it with pip",
        )
    return path.absolute()


def _visible(path: str | PathLike[str]) -> str:
    """Return the name of a file as valid Unicode, for the compiler's messages."""
    return os.fsencode(path).decode(errors="replace")


def _refuse_surrogates(language: SourceLanguage, text: str) -> None:
    """Raise an error for half a surrogate pair, which no encoding can represent."""
    found = re.search("[\ud800-\udfff]", text)
    if found is not None:
        raise errors.KernelSourceError(
            f"the text of a {language.name} kernel is not valid Unicode",
            argument=language.argument,
            expected="a str that can be written in UTF-8",
            got=f"{found[0]!r} at {found.start()}",
            hint="read the text with its encoding",
        )


@functools.lru_cache(maxsize=4)  # kernels of a C++ file and of a CUDA C++ file may alternate
def without_comments(text: str) -> str:
    """Return the text with comments and strings replaced by spaces, on the same lines."""
    return re.sub(_COMMENT, lambda match: "\n".join(" " * len(line) for line in match[0].split("\n")), text)


def _location_of(text: str, declared: str | None, otherwise: str) -> tuple[str, int]:
    """Return file and line of the literal that contains a text, for errors at the author's lines."""
    if declared is not None and text:
        whole = "".join(linecache.getlines(declared))
        before, found, _ = whole.partition(text)
        if found:
            return _visible(declared), before.count("\n") + 1
    return otherwise, 1


def folder_of(file: str | PathLike[str] | None, declared: str | None) -> str | None:
    """Return the folder of a kernel's headers: the folder of its file, or of its declaration.

    Args:
        file: File of the kernel; None if its text is given.
        declared: File that declares the kernel.
    """
    if file is not None:
        return os.path.dirname(os.path.realpath(file_of(file, declared)))
    return (
        None
        if declared is None or not os.path.exists(declared)
        else os.path.dirname(os.path.realpath(declared))
    )


def includes_of(text: str, folder: str | None, others: Sequence[str] = ()) -> Mapping[Path, str]:
    """Return the text of the headers that a kernel may include, transitively, by path.

    A directive may name such a file, a macro may stand for it, or a condition may test it. A header that
    cannot be read belongs to the compiler, or is missing; the compiler then reports it.

    Args:
        text: Text of a kernel.
        folder: Folder of its headers; None if it is unknown.
        others: Further folders, which are searched afterwards.
    """
    found: dict[Path, str] = {}
    waiting = [(text, Path(folder) if folder else None)]
    while waiting:
        including, folder_beside = waiting.pop()
        for name in named_files(including):
            for start in dict.fromkeys([folder_beside, Path(folder) if folder else None, *map(Path, others)]):
                if start is None and not Path(name).is_absolute():
                    continue
                with suppress(OSError, RuntimeError):  # an unreadable file, a loop of links, a name too long
                    path = ((start or Path()) / name).resolve()
                    if path not in found:
                        found[path] = path.read_text(encoding="utf-8", errors="replace")
                        waiting.append((found[path], path.parent))
                    break
    return found


def named_files(text: str) -> list[str]:
    """Return the files that the directives of a text name, even if comments or line ends split a directive.

    Args:
        text: Text of a source or a header.
    """
    return [name for line in _directives(text) for name in re.findall(_NAMED_FILE, line)]


def computed_includes(text: str, folder: str | None) -> list[str]:
    """Return the macros that are included by a kernel or its headers, but not defined as a header's name.

    Args:
        text: Text of a kernel.
        folder: Folder of its headers; None if it is unknown.
    """
    lines = [line for each in (text, *includes_of(text, folder).values()) for line in _directives(each)]
    defined = {match["name"] for line in lines if (match := re.match(_DEFINED_FILE, line))}
    computed = [match["name"].strip() for line in lines if (match := re.match(_COMPUTED_INCLUDE, line))]
    return [each for each in dict.fromkeys(computed) if each not in defined]


def _directives(text: str) -> list[str]:
    """Return the directives of a text, without comments, each on one line."""
    joined = text.replace("\\\r\n", "").replace("\\\n", "")
    plain = re.sub(_COMMENT, lambda match: match[0] if match[0].startswith('"') else " ", joined)
    return re.findall(_DIRECTIVE, plain)


def header_digests(text: str, folder: str | None) -> dict[str, str]:
    """Return the digest of each header that a kernel may include, by its absolute path; see `includes_of`."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in includes_of(text, folder)}


def include_parts(text: str, folder: str | None) -> dict[str, str]:
    """Return the part of a cache key for a kernel's headers; empty if it has none."""
    found = includes_of(text, folder)
    if not found:
        return {}
    return {"includes": "\0".join(f"{path}\0{held}" for path, held in sorted(found.items()))}


def has_includes(text: str) -> bool:
    """Return True if a text may have an `#include` without angle brackets."""
    return re.search(_OWN_INCLUDE, text) is not None
