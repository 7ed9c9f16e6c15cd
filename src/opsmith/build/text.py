"""The text of a kernel in C++ or CUDA C++, and the function in it that is the kernel."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from opsmith import errors

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Language:
    """What a kernel is written in.

    Attributes:
        name: As messages call it.
        argument: The argument of `op.kernel` that gives the text; with `_file` behind it, that of a file.
        function: What the kernel is in it, as `function`.
        pattern: Finds the function whose name stands for `{name}`.
        expected: How that begins, with `{name}`, and what its parameters are.
        others: What there is in a text in its place.
    """

    name: str
    argument: str
    function: str
    pattern: str
    expected: str
    others: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Found:
    """A function that was found in a text.

    Attributes:
        text: All of it.
        bare: The same without comments and strings.
        name: Name of the function.
        path: The file that the text stands in.
        line: The line of it on which the text begins, from 1.
        at: The line of it on which the function is named.
        match: What the language's pattern found.
    """

    text: str
    bare: str
    name: str
    path: str
    line: int
    at: int
    match: re.Match[str]


def find_function(
    language: Language,
    operator: str,
    *,
    text: str | None,
    file: str | PathLike[str] | None,
    entry: str | None,
    declared: str | None,
) -> Found:
    """Find the function in a text that is the kernel.

    Args:
        language: What it is written in.
        operator: Name of the operator, `namespace::name`.
        text: The text itself.
        file: Or a file; a relative path is beside the file that declares the kernel.
        entry: Name of the function; by default the operator's own, without its namespace.
        declared: The file in which the kernel is declared.

    Raises:
        KernelSourceError: If there is no such file, or no such function in it.
    """
    whole, path, line = _text_of(language, operator, text, file, declared)
    name = entry or operator.partition("::")[2]
    bare = _without_comments(whole)
    match = re.search(language.pattern.format(name=re.escape(name)), bare, re.VERBOSE)
    if match is None:
        raise errors.KernelSourceError(
            f"the {language.name} source has no {language.function} `{name}`",
            operator=operator,
            argument="entry",
            expected=language.expected.format(name=name),
            got=language.others(bare),
            where=f"{path}:{line}",
            hint=f"name the kernel `{name}`, or say which function it is with `entry=`",
        )
    return Found(whole, bare, name, path, line, line + bare.count("\n", 0, match.end()), match)


def _text_of(
    language: Language,
    operator: str,
    text: str | None,
    file: str | PathLike[str] | None,
    declared: str | None,
) -> tuple[str, str, int]:
    """The text, the file that it stands in, and the line on which it begins there."""
    if file is None:
        if not isinstance(text, str):
            raise errors.KernelSourceError(
                f"the text of a {language.name} kernel is none",
                operator=operator,
                argument=language.argument,
                expected="a str, which holds the source",
                got=repr(text),
                hint=f"write `{language.argument}_file=` where it is the path of a file",
            )
        return text, *_place_of(text, declared, f"<{language.argument} of {operator}>")
    path = Path(file)
    if not path.is_absolute() and declared is not None and Path(declared).exists():
        path = Path(declared).parent / path
    try:
        return path.read_text(encoding="utf-8"), str(path), 1
    except (OSError, UnicodeDecodeError) as error:
        raise errors.KernelSourceError(
            f"the file of a {language.name} kernel cannot be read",
            operator=operator,
            argument=f"{language.argument}_file",
            expected=f"a file of {language.name} in UTF-8; a relative path is beside the file that "
            "declares it",
            got=f"{path}: {error}",
            hint=f"give the path of the file, or its text as `{language.argument}=`",
        ) from error


def _without_comments(text: str) -> str:
    """The text with spaces in the place of comments and strings, in the same lines."""
    return _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _place_of(text: str, declared: str | None, otherwise: str) -> tuple[str, int]:
    """The file and line at which a text stands as a literal: errors name lines that its author sees."""
    if declared is not None and text:
        whole = "".join(linecache.getlines(declared))
        before, found, _ = whole.partition(text)
        if found:
            return declared, before.count("\n") + 1
    return otherwise, 1
