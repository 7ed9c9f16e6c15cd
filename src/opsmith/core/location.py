"""Locations in source code, `file:line`: of a function, and of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


def where(function: Callable[..., Any]) -> str:
    """Return `file:line` of a Python function, under its decorators; its name if there is no source.

    Example:
        >>> where(len)
        'len'
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return str(getattr(function, "__name__", type(function).__qualname__))
    return f"{code.co_filename}:{code.co_firstlineno}"


@dataclass(frozen=True)
class CallSite:
    """The location of a call that creates a class, named as a class statement there would be.

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
        ...     return site_of(inspect.currentframe()).scope
        >>> some()
        'some.<locals>.'
    """
    if frame is None:  # another Python than CPython
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
