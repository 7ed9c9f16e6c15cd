"""Where a function was written, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def where(function: Callable[..., Any]) -> str:
    """`file:line` of a Python function, behind its decorators; its name where there is no source.

    Example:
        >>> where(len)
        'len'
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return str(getattr(function, "__name__", type(function).__qualname__))
    return f"{code.co_filename}:{code.co_firstlineno}"
