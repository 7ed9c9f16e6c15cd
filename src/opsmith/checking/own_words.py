"""Whether an exception is the operator's own word, or that of what it calls.

An operator that checks its arguments raises itself, or has a check of torch's raise. Where an operation of
torch or a built-in function of Python raises on the way, nobody has said that the input is none.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

import opsmith
from opsmith import errors
from opsmith.adopting.registered import is_operator
from opsmith.checking.mistakes import Overlooking

CHECKS = ("_check", "_assert")
"""How the functions of torch begin by which an operator checks its arguments."""

RAISE = "RAISE_VARARGS"
"""What Python compiles `raise` and `assert` to."""

TORCHS = ("aten", "prims", "prim")
"""Namespaces of torch's own operators; others hold those of authors."""

_LIBRARY = Path(torch.__file__).parent
_OURS = Path(opsmith.__file__).parent


def own_words(error: Exception, again: Callable[[], Any]) -> bool:
    """Whether an exception is the operator's own word; where nothing tells, it is held to be.

    Args:
        error: What was raised.
        again: Makes the call again that raised it.

    Example:
        >>> def first(items):
        ...     return items[0]
        >>> try:
        ...     first([])
        ... except IndexError as error:
        ...     own_words(error, lambda: first([]))
        False
    """
    if isinstance(error, errors.OpsmithError):
        return True
    stack = [*_stack(error.__traceback__)]
    operators = [at for at, (frame, _) in enumerate(stack) if _is_operators(frame)]
    if not operators:
        return True
    (frame, instruction), inner = stack[operators[-1]], stack[operators[-1] + 1 :]
    name = _opcode(frame, instruction)
    if name == RAISE:
        return True
    if inner:
        checks = inner[0][0].f_code.co_name.startswith(CHECKS)
        return checks or any(_calls_other_operator(each) for each, _ in inner)
    if not name.startswith("CALL"):
        return False
    return not _is_known(_raising(again, frame, instruction))


def raised_within(error: BaseException) -> bool:
    """Whether it is raised by a line of the operator's own code, be it by compiled code that this calls."""
    stack = [*_stack(error.__traceback__)]
    return bool(stack) and _is_operators(stack[-1][0])


def by_statement(error: BaseException) -> bool:
    """Whether a statement raises it, a `raise` or an `assert`, be it the operator's or torch's."""
    stack = [*_stack(error.__traceback__)]
    return bool(stack) and _opcode(*stack[-1]) == RAISE


def stated(error: BaseException) -> bool:
    """Whether a statement of the operator's own code raises it.

    Example:
        >>> try:
        ...     raise ValueError("no")
        ... except ValueError as error:
        ...     stated(error)
        True
    """
    return raised_within(error) and by_statement(error)


def _opcode(frame: FrameType, instruction: int) -> str:
    return dis.opname[frame.f_code.co_code[instruction]]


def _stack(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti
        traceback = traceback.tb_next


def _is_operators(frame: FrameType) -> bool:
    place = Path(frame.f_code.co_filename)
    return not (place.is_relative_to(_LIBRARY) or place.is_relative_to(_OURS))


def _calls_other_operator(frame: FrameType) -> bool:
    """Whether a frame of torch calls an operator that is none of torch's, and may check its arguments."""
    called = frame.f_locals.get("self")
    return is_operator(called) and str(called).partition(".")[0] not in TORCHS


def _raising(again: Callable[[], Any], frame: FrameType, instruction: int) -> Any:
    """The function without a frame of its own that raises at an instruction; None where none does."""
    found: list[Any] = []

    def profile(caller: FrameType, event: str, called: Any) -> None:
        if event == "c_exception" and caller.f_code is frame.f_code and caller.f_lasti == instruction:
            found.append(called)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with Overlooking():  # it has raised once already
            again()
    finally:
        _profile_on(before)
    return found[-1] if found else None


def _profile_on(before: Any) -> None:
    """Put back what profiled before; that of cProfile, no function in Python 3.11, has to start anew."""
    if before is None or callable(before):
        sys.setprofile(before)
    else:
        before.enable()


def _is_known(called: Any) -> bool:
    """Whether a function is one of torch, NumPy or Python, and no compiled code of an author."""
    owner = getattr(called, "__self__", None)
    kind = getattr(called, "__objclass__", None) if owner is None else type(owner)
    home = getattr(called, "__module__", None) or getattr(kind, "__module__", None)
    root = str(home).partition(".")[0]
    return root in ("torch", "numpy") or root in sys.stdlib_module_names
