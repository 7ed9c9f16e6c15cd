"""Locations in source code, `file:line`: of functions, of calls, and of lines of the user's code."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from opsmith.core.source import code_of


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an exception and its causes, the outermost first."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    return chain


def where(function: Callable[..., Any] | CodeType) -> str:
    """Return `file:line` of a Python function without decorators, or of a kernel's source; else its name.

    The line of a method is that of its `def`; of another function, that of its first decorator.

    Example:
        >>> where(len)
        'len'
    """
    code = function if isinstance(function, CodeType) else code_of(function)
    if code is None:
        source = getattr(function, "where", None)
        if isinstance(source, str):
            return source
        return str(getattr(function, "__name__", type(function).__qualname__))
    return f"{code.co_filename}:{_first_line(code)}"


def _first_line(code: CodeType) -> int:
    first = code.co_firstlineno
    scope = code.co_qualname.rpartition(".")[0]
    if not scope or scope.endswith("<locals>"):
        return first
    lines = linecache.getlines(code.co_filename)[first - 1 :]
    if not lines or not lines[0].lstrip().startswith("@"):
        return first
    own = re.compile(rf"\s*(?:async\s+)?def\s+{code.co_name}\b")
    return next((number for number, line in enumerate(lines, first) if own.match(line)), first)


@dataclass(frozen=True)
class CallSite:
    """The location of a call that creates a class, for the name that a class statement there would give it.

    Args:
        module: Name of the module.
        scope: Prefix of the qualified name: empty at the top of a module.
        where: `file:line`.
    """

    module: str
    scope: str
    where: str


def call_site(frame: FrameType | None) -> CallSite:
    """Return the location of a frame.

    Example:
        >>> import inspect
        >>> def some():
        ...     return call_site(inspect.currentframe()).scope
        >>> some()
        'some.<locals>.'
    """
    if frame is None:  # a Python other than CPython
        return CallSite("__main__", "", "")
    code = frame.f_code
    if code.co_flags & inspect.CO_OPTIMIZED:
        scope = f"{code.co_qualname}.<locals>."
    elif "__qualname__" in frame.f_locals and frame.f_locals is not frame.f_globals:
        scope = f"{frame.f_locals['__qualname__']}."  # the body of a class
    else:
        scope = ""
    module = str(frame.f_globals.get("__name__", "__main__"))
    return CallSite(module, scope, f"{code.co_filename}:{frame.f_lineno}")


SourceLine = tuple[str, int]
"""A file and the number of a line in it."""

_PLACE = re.compile(r"(?s:(.+)):([1-9][0-9]{0,8})")


def parsed(where: str | None) -> SourceLine | None:
    """Return the file and the number of `file:line`; None for another text, as the name of a function.

    Example:
        >>> parsed("demo.py:7"), parsed("len"), parsed("demo.py:²")
        (('demo.py', 7), None, None)
    """
    found = _PLACE.fullmatch(where or "")
    return None if found is None else (found[1], int(found[2]))


_OPSMITH = Path(__file__).parents[1]
_PACKAGES = Path(torch.__file__).parents[1]
_INTERACTIVE = ("<stdin>", "<ipython-input", "<doctest", "<console>")
_ENTRY = r'(?m:^\s*File "(?P<file>.+)", line (?P<line>\d+))'


@functools.cache
def _folders() -> tuple[str, ...]:
    """Return the folders of torch, opsmith, the bundled operators, Python and installed packages."""
    import sysconfig  # slow to import

    python, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    folders = (Path(torch.__file__).parent, _OPSMITH, _OPSMITH / "ops", python, packages)
    return tuple(f"{folder}{os.sep}" for folder in folders)


def is_user_code(file: str) -> bool:
    """Return True for a file of a bundled operator, or one that does not belong to torch, Python or opsmith.

    Example:
        >>> is_user_code(torch.__file__), is_user_code("network.py")
        (False, True)
    """
    if file.startswith("<"):
        return file.startswith(_INTERACTIVE)
    torch_, opsmith, ops, python, packages = _folders()
    if file.startswith((torch_, opsmith)) and not file.startswith(ops):
        return False
    return not file.startswith(python) or file.startswith((ops, packages))


def user_line_of_frame(frame: FrameType | None) -> SourceLine | None:
    """The line of the innermost user frame among this frame and its callers; None if there is none."""
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


HELD_BY_FRAME = 3 if sys.version_info < (3, 13) else -1
"""Number of references to the local variables of a frame: the frame's, a variable's and an argument's."""


def scopes_of_callers() -> Iterator[dict[str, Any]]:
    """The local and the global variables of each user frame among the callers, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            live = frame.f_locals
            scope = dict(live)
            # Before Python 3.13 this is a copy, which keeps deleted values alive; `locals()` returns it, too.
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(live) <= HELD_BY_FRAME:
                live.clear()
            yield from (scope, frame.f_globals)
        frame = frame.f_back


def user_line_of_traceback(text: Any) -> SourceLine | None:
    """The innermost user line in the text of a traceback, whose last entry is the innermost."""
    found = [(each["file"], int(each["line"])) for each in re.finditer(_ENTRY, str(text or ""))]
    return next((line for line in reversed(found) if is_user_code(line[0])), None)


def innermost(error: BaseException, location: str) -> str:
    """The last line, in the file of `location`, that an exception passed through; else `location`."""
    file, _ = parsed(location) or ("", 0)
    own = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == file]
    return f"{file}:{own[-1].lineno}" if own else location


def shown_line(line: SourceLine | None) -> tuple[str, str]:
    """A line as `file:line` for display, and its text; both are empty for None."""
    if line is None:
        return "", ""
    file, number = line
    return f"{short_path(file)}:{number}", linecache.getline(file, number).strip()


def line_at(where: str) -> str:
    """The text of a line of source; empty if the file cannot be read or the place is not `file:line`.

    Example:
        >>> line_at(f"{torch.__file__}:1") != "", line_at("nowhere.py:1"), line_at("len")
        (True, '', '')
    """
    if (found := parsed(where)) is None:
        return ""
    linecache.checkcache(found[0])
    return linecache.getline(*found).strip()


def short_path(file: str) -> str:
    """A path relative to the folder of installed packages, or to the working folder.

    Example:
        >>> short_path(torch.__file__)
        'torch/__init__.py'
    """
    path = Path(file)
    for parent in (_PACKAGES, Path.cwd(), _OPSMITH.parent):  # an environment may be in the folder
        if path.is_relative_to(parent):
            return path.relative_to(parent).as_posix()
    return path.name if path.is_absolute() else path.as_posix()


def short_location(where: str) -> str:
    """Shorten the path of a `file:line`, as `short_path` does."""
    found = parsed(where)
    return where if found is None else f"{short_path(found[0])}:{found[1]}"
