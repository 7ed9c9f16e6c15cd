"""Exceptions of a check, each attributed to the operator (a finding) or to the checker (a bug of ours)."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.adopting.registered import is_operator
from opsmith.checking.processes.fork import in_child, report_hang
from opsmith.checking.processes.watchdog import EndlessCallError, OutOfTimeError, Watchdog
from opsmith.checking.side_effects.global_settings import without_logs, without_warnings
from opsmith.judging.attribution import CALLS, AboutOperatorError, is_own
from opsmith.torch_library import capabilities

T = TypeVar("T")


@dataclass(frozen=True)
class NamedFault:
    """Fault that an exception names.

    Args:
        cause: The word for it.
        reason: The fault in a sentence; empty where the exception's own message names it.
        position: Position of the input whose gradient it is about, among those that autograd sees.
    """

    cause: str
    reason: str = ""
    position: int | None = None


def named_by(error: BaseException) -> NamedFault:
    """The fault that an exception names; `raises` where it names none.

    Example:
        >>> text = "function FBackward returned an incorrect number of gradients (expected 2, got 1)"
        >>> named_by(RuntimeError(text)).cause
        'gradient-count'
    """
    for kind, cause in _OURS.items():
        if isinstance(error, kind):
            return NamedFault(cause)
    if isinstance(error, errors.OpsmithError) and error.fault:
        return NamedFault(error.fault)
    if isinstance(error, errors.MetadataError):
        return NamedFault("not-written" if error.moved else "shape")
    if isinstance(error, errors.MutationError):
        written = error.argument or ""
        return NamedFault("mutates-grad-output" if written.startswith("grad") else "mutates-input")
    if isinstance(error, errors.GradientShapeError):
        return NamedFault(_shape_cause(str(error.got or ""), str(error.expected or "")))
    text = str(error)
    for pattern, name in _TORCHS.items():
        found = re.search(pattern, text)
        if found is not None:
            return name(found)
    return NamedFault("raises")


_OURS: dict[type[errors.OpsmithError], str] = {
    errors.GradientCountError: "gradient-count",
    errors.GradientDtypeError: "dtype",
    errors.SavedTensorModifiedError: "mutates-saved",
    errors.AliasError: "aliases-input",
    errors.GraphCutError: "second-order",
    errors.IntegerResultError: "dtype",
}
"""Errors of ours that each stand for one fault."""


def _count(found: re.Match[str]) -> NamedFault:
    expected, got = int(found["expected"]), int(found["got"])
    reason = (
        f"the backward returns {got} gradient{'s' * (got != 1)}, and the forward takes {expected} "
        f"argument{'s' * (expected != 1)}: return one for each, in their order, and None for what has none"
    )
    return NamedFault("gradient-count", reason)


def _invalid(found: re.Match[str]) -> NamedFault:
    got, expected, position = found["got"], found["expected"], int(found["index"])
    cause = _shape_cause(got, expected)
    reason = f"the gradient has the shape {got}, and the input {expected}"
    if cause == "unreduced-broadcast":
        reason += ": sum it over the dimensions along which the input was repeated"
    return NamedFault(cause, reason, position)


def _invalid_dtype(found: re.Match[str]) -> NamedFault:
    return NamedFault(
        "dtype", f"the gradient is {found['got']}, and the input {found['expected']}", int(found["index"])
    )


_TORCHS: dict[str, Callable[[re.Match[str]], NamedFault]] = {
    r"returned an incorrect number of gradients \(expected (?P<expected>\d+), got (?P<got>\d+)\)": _count,
    r"returned an invalid gradient at index (?P<index>\d+) - got (?P<got>\[[^\]]*\]) but expected shape "
    r"compatible with (?P<expected>\[[^\]]*\])": _invalid,
    r"returned an invalid gradient at index (?P<index>\d+) - expected (?:type|dtype) (?P<expected>\S+) but "
    r"got (?P<got>\S+)": _invalid_dtype,
    r"modified by an inplace operation": lambda found: NamedFault(
        "mutates-saved", "something that was saved for the backward was written into after it was saved"
    ),
    r"a leaf Variable that requires grad is being used in an in-place operation": lambda found: NamedFault(
        "mutates-input", "it writes into an argument"
    ),
    r"view size is not compatible|use \.reshape\(\.\.\.\) instead": lambda found: NamedFault(
        "layout", "it takes a view of a tensor that is not contiguous"
    ),
}
"""Messages of torch's engine, and the fault that each names."""


def _shape_cause(got: str, expected: str) -> str:
    """Decide whether a gradient of a wrong shape was not summed over what was broadcast."""
    got_sizes, right = _sizes(got), _sizes(expected.partition(",  ")[0].partition(", or")[0])
    if len(got_sizes) < len(right) or got_sizes == right:
        return "shape"
    # A gradient before the sum has more dimensions, or larger ones where the input has size one.
    left = list(got_sizes)
    for size in right:
        if size in left:
            left.remove(size)
        elif size != 1:
            return "shape"
    return "unreduced-broadcast" if left else "shape"


def _sizes(text: str) -> list[int]:
    found = re.match(r"\[([^\]]*)\]", text)
    return [int(each) for each in found[1].split(",") if each.strip()] if found else []


class UncheckableError(Exception):
    """Exception that ends the check: the property cannot run here, whatever the operator is.

    Args:
        reason: The error for the caller.
    """

    def __init__(self, reason: errors.OpsmithError) -> None:
        self.reason = reason
        super().__init__(str(reason))


def refuse_own(error: BaseException) -> None:
    """Raise an exception of the checker itself again: it is a bug of ours, not a finding.

    An operator that calls `sys.exit` raises SystemExit. KeyboardInterrupt is the user's, except in a child
    process, which Ctrl-C does not reach. EndlessCallError and OutOfTimeError end the property.

    Example:
        >>> try:
        ...     [][0]
        ... except IndexError as error:
        ...     refuse_own(error)
    """
    if not _is_the_operators(error):
        raise error


def _is_the_operators(error: BaseException) -> bool:
    raised = isinstance(error, Exception | SystemExit) and not isinstance(error, UncheckableError)
    leaves = isinstance(error, GeneratorExit | EndlessCallError | OutOfTimeError | UncheckableError)
    return (raised or (in_child() and not leaves)) and not is_own(error)


@dataclass(frozen=True)
class Raised:
    """An exception of the operator, or of the tool of torch that runs it."""

    error: Exception

    def __str__(self) -> str:
        return error_words(self.error)


def attempt(call: Callable[[], T]) -> T | Raised:
    """The result of a call in silence, or what it raises; an exception of the checker itself goes on.

    Example:
        >>> str(attempt(lambda: torch.ones(2).view(3)))
        "RuntimeError: shape '[3]' is invalid for input of size 2"
    """
    try:
        with without_warnings(), without_logs():
            return call()
    except Exception as error:
        refuse_own(error)
        return Raised(error)


def error_words(error: BaseException) -> str:
    """The name of an exception, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """First line of an exception's message, without addresses.

    Example:
        >>> first_line(ValueError(f"no room in {object()}\\nbuy more"))
        'no room in <object object>'
    """
    # Addresses differ between processes, and the same seed must give the same report.
    return _ADDRESS.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Overlooking:
    """A region that ignores exceptions of the operator, which are reported elsewhere, or are the answer.

    Example:
        >>> with Overlooking():
        ...     [][0]
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and _is_the_operators(error)


def watched_calls(*more: CodeType) -> Watchdog:
    """A region in which a call of the operator that does not return is stopped by `EndlessCallError`.

    Args:
        more: Codes of other functions that call it.
    """
    return Watchdog((*CALLS, *more), report_hang if in_child() else None)


CHECKS = ("_check", "_assert")
"""Prefixes of the functions of torch that check arguments."""

RAISE = "RAISE_VARARGS"
"""Opcode of `raise` and `assert`."""

TORCHS = ("aten", "prims", "prim")
"""Namespaces of torch's own operators; others hold those of authors."""

_LIBRARY = Path(torch.__file__).parent
_OPSMITH = Path(opsmith.__file__).parent


def attribute_exception(error: Exception, again: Callable[[], Any]) -> bool:
    """True if the operator raises an exception on purpose; in doubt, it does.

    Args:
        error: The exception.
        again: Repeats the call that raised it.

    Example:
        >>> def first(items):
        ...     return items[0]
        >>> try:
        ...     first([])
        ... except IndexError as error:
        ...     attribute_exception(error, lambda: first([]))
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
    """True if a line of the operator's own code raises it, or compiled code that this calls."""
    stack = [*_stack(error.__traceback__)]
    return bool(stack) and _is_operators(stack[-1][0])


def within_backward(error: BaseException) -> bool:
    """True if an error of a backward comes through code of the operator, as a class in its reference."""
    return any(_is_operators(frame) for frame, _ in _stack(error.__traceback__))


def of_backward(error: BaseException) -> bool:
    """True if torch's engine raises it, or a backward that the engine runs: the call has returned before."""
    engine = {each.__code__ for each in (torch.autograd.grad, torch.autograd.backward)}
    engine.add(capabilities.differentiated.__code__)
    frames = (frame for frame, _ in _stack(error.__traceback__))
    first = next((each for each in frames if each.f_code in engine or _is_operators(each)), None)
    return first is not None and first.f_code in engine


def by_statement(error: BaseException) -> bool:
    """True if a statement raises it, a `raise` or an `assert`, of the operator or of torch."""
    stack = [*_stack(error.__traceback__)]
    return bool(stack) and _opcode(*stack[-1]) == RAISE


def stated(error: BaseException) -> bool:
    """True if a statement of the operator's own code raises it.

    Example:
        >>> try:
        ...     raise ValueError("no")
        ... except ValueError as error:
        ...     stated(error)
        True
    """
    stack = [*_stack(error.__traceback__)]
    own = raised_within(error) and by_statement(error)
    return own and not _is_known_module(stack[-1][0].f_globals.get("__name__"))


def _opcode(frame: FrameType, instruction: int) -> str:
    return dis.opname[frame.f_code.co_code[instruction]]


def _stack(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti
        traceback = traceback.tb_next


def _is_operators(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return not (path.is_relative_to(_LIBRARY) or path.is_relative_to(_OPSMITH))


def _calls_other_operator(frame: FrameType) -> bool:
    """True if a frame of torch calls an operator that is not torch's, which may check its arguments."""
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
    """Restore the profiler; that of cProfile, which is not callable in Python 3.11, must be enabled again."""
    if before is None or callable(before):
        sys.setprofile(before)
    else:
        before.enable()


def _is_known(called: Any) -> bool:
    """True if a function belongs to torch, NumPy or Python, and not to an author's compiled code."""
    owner = getattr(called, "__self__", None)
    kind = getattr(called, "__objclass__", None) if owner is None else type(owner)
    return _is_known_module(getattr(called, "__module__", None) or getattr(kind, "__module__", None))


def _is_known_module(name: str | None) -> bool:
    root = str(name).partition(".")[0]
    return root in ("torch", "numpy") or root in sys.stdlib_module_names


class WrongCountError(AboutOperatorError):
    """A list has another length than the reference's, so that its tensors cannot be compared.

    Args:
        result: Name of the result.
        got: Length of its list.
        expected: Length of the reference's.
        where: `file:line` of what returned it.
    """

    def __init__(self, result: str, got: int, expected: int, where: str) -> None:
        tensors = f"{got} tensor{'s' * (got != 1)}"
        super().__init__(f"it returns {tensors} for `{result}`, and the reference {expected}")
        self.result, self.where = result, where


class WrongFormError(AboutOperatorError):
    """A class returned another structure than in the run that determined its results.

    Args:
        result: Name of its first result.
        got: Description of the returned value.
        expected: Description of the value in that run.
        where: `file:line` of what returned it.
    """

    def __init__(self, result: str, got: str, expected: str, where: str) -> None:
        super().__init__(f"it returns {got}, and in an earlier call returned {expected} in its place")
        self.result, self.where = result, where


def structure_of(value: Any) -> str:
    """Describe a returned value: its type, or the number of values in a tuple or list.

    Example:
        >>> structure_of((1, 2)), structure_of(0.5)
        ('2 values', 'a float')
    """
    if isinstance(value, tuple | list):
        return f"{len(value)} value{'s' * (len(value) != 1)}"
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
