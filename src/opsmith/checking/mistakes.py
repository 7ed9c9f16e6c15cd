"""Whose an exception is: the operator's, which is a finding, or the check's own, which is never told as one.

Its traceback tells: what is raised where the check itself computes is the check's own. What an operator
raises is raised in its own code, in torch, or where the check does no more than call it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TypeVar

from opsmith import errors
from opsmith.checking.isolation import in_child

Call = TypeVar("Call", bound=Callable[..., Any])


class AboutOperatorError(Exception):
    """What the check itself raises, on purpose, about what an operator did."""


class UncheckableError(Exception):
    """What keeps a property from being looked at here, whatever the operator is: it ends the check.

    Args:
        reason: What the caller is told.
    """

    def __init__(self, reason: errors.OpsmithError) -> None:
        self.reason = reason
        super().__init__(str(reason))


def calls_operator(function: Call) -> Call:
    """Mark a function that calls the operator, or copies it: what it raises, compiled code has raised in it.

    Example:
        >>> @calls_operator
        ... def run(kernel, x):
        ...     return kernel(x)
        >>> run(len, "four")
        4
    """
    _CALLS.append(function.__code__)
    return function


def refuse_own(error: BaseException) -> None:
    """Raise an exception again that comes out of the check itself: the operator is not to blame for it.

    An operator that calls `sys.exit` raises SystemExit. Ctrl-C is not its doing, but in a child process,
    which no Ctrl-C reaches.

    Example:
        >>> try:
        ...     [][0]
        ... except IndexError as error:
        ...     refuse_own(error)
    """
    raised = isinstance(error, Exception | SystemExit) and not isinstance(error, UncheckableError)
    if not (raised or (in_child() and not isinstance(error, GeneratorExit))) or _is_own(error):
        raise error


class Overlooking:
    """A region that what the operator raises ends in silence, since it is told elsewhere, or is the answer.

    Example:
        >>> with Overlooking():
        ...     [][0]
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return isinstance(error, Exception) and not _is_own(error)


def _is_own(error: BaseException) -> bool:
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # what Python makes another of where it leaves a generator of the check
    code = _innermost(error.__traceback__)
    if code is None or isinstance(error, AboutOperatorError | errors.OpsmithError):
        return False
    if any(code is each for each in _CALLS):
        return False
    return Path(code.co_filename).is_relative_to(_HERE)


def _innermost(traceback: TracebackType | None) -> CodeType | None:
    """The code that raised; None of what has come here without its traceback, as from another process."""
    code = None
    while traceback is not None:
        code, traceback = traceback.tb_frame.f_code, traceback.tb_next
    return code


_CALLS: list[CodeType] = []
"""Compared by identity: codes of two files may be equal."""

_HERE = Path(__file__).parent
