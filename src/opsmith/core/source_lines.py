"""Lines of the user's code: the call site on a stack or in a traceback, and its short form for display."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

import torch

Line = tuple[str, int]
"""A file and the number of a line in it."""

_OPSMITH = Path(__file__).parents[1]
_PACKAGES = Path(torch.__file__).parents[1]
_LIBRARY = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, _OPSMITH, sysconfig.get_path("stdlib"))
)
_USERS = tuple(f"{folder}{os.sep}" for folder in (_OPSMITH / "ops", sysconfig.get_path("purelib")))
_INTERACTIVE = ("<stdin>", "<ipython-input", "<doctest", "<console>")
_ENTRY = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)


def is_user_code(file: str) -> bool:
    """Whether a file is the user's: not torch's, Python's or opsmith's; the bundled operators count.

    Example:
        >>> is_user_code(torch.__file__), is_user_code("network.py")
        (False, True)
    """
    if file.startswith("<"):
        return file.startswith(_INTERACTIVE)
    torch_or_opsmith = file.startswith(_LIBRARY[:2]) and not file.startswith(_USERS[:1])
    return not torch_or_opsmith and (not file.startswith(_LIBRARY[2:]) or file.startswith(_USERS))


def user_line_of_frame(frame: FrameType | None) -> Line | None:
    """The line of the innermost user frame among this one and its callers; None where there is none."""
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def user_line_of_traceback(text: Any) -> Line | None:
    """The innermost user line in the text of a traceback, whose last entry is the innermost."""
    found = [(each["file"], int(each["line"])) for each in _ENTRY.finditer(str(text or ""))]
    return next((line for line in reversed(found) if is_user_code(line[0])), None)


def shown_line(line: Line | None) -> tuple[str, str]:
    """A line as `file:line` for display, and its text; both are empty for None."""
    if line is None:
        return "", ""
    file, number = line
    return f"{short_path(file)}:{number}", linecache.getline(file, number).strip()


def short_path(file: str) -> str:
    """A path relative to where packages are installed, or to the working folder.

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
    """The same for `file:line`."""
    file, colon, line = where.rpartition(":")
    return f"{short_path(file)}:{line}" if colon else where
