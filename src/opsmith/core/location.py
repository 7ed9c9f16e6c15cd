"""Where a function was written, for messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def where(function: Callable[..., Any]) -> str:
    """`file:line` of a Python function; its name where there is no source, as for a builtin.

    Example:
        >>> where(len)
        'len'
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return str(getattr(function, "__name__", type(function).__qualname__))
    return f"{code.co_filename}:{code.co_firstlineno}"
