"""The line of a program that a call stands on: the innermost that is neither torch's nor ours."""

from __future__ import annotations

import linecache
import os
import re
from pathlib import Path
from types import FrameType

import torch

import opsmith

_TORCH = str(Path(torch.__file__).parent)
_OPSMITH = str(Path(opsmith.__file__).parent)
_OPERATORS = str(Path(_OPSMITH) / "ops")


def call_site(frame: FrameType | None) -> tuple[str, str]:
    """`file:line` of the innermost frame that belongs to a user, and that line; empty where there is none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if _of_user(name) and "_op_overload" not in frame.f_globals:  # what opsmith writes is not the user's
            return told(name, frame.f_lineno)
        frame = frame.f_back
    return "", ""


def _of_user(name: str) -> bool:
    return not name.startswith((_TORCH + os.sep, "<frozen")) and (
        not name.startswith(_OPSMITH + os.sep) or name.startswith(_OPERATORS + os.sep)
    )


_ENTRY = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')


def site_of_traceback(lines: list[str]) -> tuple[str, str]:
    """The same from a traceback that anomaly mode has put into a node's metadata."""
    for entry in reversed(lines):
        found = _ENTRY.match(entry)
        if found is not None and _of_user(found["file"]):
            return told(found["file"], int(found["line"]))
    return "", ""


def told(file: str, line: int) -> tuple[str, str]:
    """A place as it is shown, and the line that stands there."""
    return f"{short_path(file)}:{line}", linecache.getline(file, line).strip()


def short_path(file: str) -> str:
    """A path as people write it: from where packages are installed, or from the working folder.

    Example:
        >>> import torch
        >>> short_path(torch.__file__)
        'torch/__init__.py'
    """
    path = Path(file)
    for parent in (_PACKAGES, Path.cwd(), Path(_OPSMITH).parent):  # an environment may be in the folder
        if path.is_relative_to(parent):
            return path.relative_to(parent).as_posix()
    return path.name if path.is_absolute() else path.as_posix()


def short_place(where: str) -> str:
    """The same of `file:line`."""
    file, colon, line = where.rpartition(":")
    return f"{short_path(file)}:{line}" if colon else where


_PACKAGES = Path(_TORCH).parent
