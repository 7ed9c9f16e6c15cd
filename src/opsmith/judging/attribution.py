"""Attribution of exceptions: to the author's function that runs, or to opsmith's code that judges it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TypeVar

import torch

from opsmith import errors

Call = TypeVar("Call", bound=Callable[..., Any])


class AboutOperatorError(Exception):
    """Exception that the checker raises on purpose about the behaviour of an operator."""


def calls_operator(function: Call) -> Call:
    """Mark a function that calls the operator: compiled code in it raises exceptions of the operator.

    Example:
        >>> @calls_operator
        ... def run(kernel, x):
        ...     return kernel(x)
        >>> run(len, "four")
        4
    """
    CALLS.append(function.__code__)
    return function


def is_own(error: BaseException) -> bool:
    """Return True for an exception of the judging or checking code, and not of a function that it runs."""
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # Python replaces a StopIteration that leaves a generator
    code = _innermost(error.__traceback__)
    # A GPU reports an error in a kernel late, at any later use of the GPU.
    if code is None or isinstance(error, AboutOperatorError | errors.OpsmithError | torch.AcceleratorError):
        return False
    if any(code is each for each in CALLS):
        return False
    return any(Path(code.co_filename).is_relative_to(each) for each in OURS)


def _innermost(traceback: TracebackType | None) -> CodeType | None:
    """The code that raised; None for an exception without a traceback, such as from another process."""
    code = None
    while traceback is not None:
        code, traceback = traceback.tb_frame.f_code, traceback.tb_next
    return code


CALLS: list[CodeType] = []
"""Code objects of the marked functions, compared by identity, since two files may have equal code."""


def raise_own(error: BaseException) -> None:
    """Raise an exception of the judging code again: it is a bug of opsmith, not a function's result."""
    if is_own(error):
        raise error


OURS = tuple(Path(__file__).parents[1] / each for each in ("checking", "judging"))
"""Folders of opsmith's code that runs authors' functions."""
