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
        cause: Name of the cause.
        reason: The fault in a sentence; empty if the exception's own message names it.
        position: Position of the input whose gradient is wrong, among the inputs that autograd sees.
    """

    cause: str
    reason: str = ""
    position: int | None = None


def named_by(error: BaseException) -> NamedFault:
    """The fault that an exception names; `raises` if it names none.

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
    for pattern, (cause, reason) in _TORCHS.items():
        found = re.search(pattern, str(error))
        if found is not None:
            return _of_torch(found, cause, reason)
    return NamedFault("raises")


def _of_torch(found: re.Match[str], cause: str, reason: str) -> NamedFault:
    parts: dict[str, Any] = found.groupdict()
    if cause == "gradient-count":
        parts |= {f"{name}_s": "s" * (parts[name] != "1") for name in ("got", "expected")}
    elif cause == "shape":
        cause = _shape_cause(parts["got"], parts["expected"])
        if cause == "unreduced-broadcast":
            reason += ": sum it over the dimensions along which the input was repeated"
    position = parts.get("index")
    return NamedFault(cause, reason.format(**parts), None if position is None else int(position))


_OURS: dict[type[errors.OpsmithError], str] = {
    errors.GradientCountError: "gradient-count",
    errors.GradientDtypeError: "dtype",
    errors.SavedTensorModifiedError: "mutates-saved",
    errors.AliasError: "aliases-input",
    errors.GraphCutError: "second-order",
    errors.IntegerResultError: "dtype",
}
"""Errors of opsmith that each name one fault."""


_TORCHS = {
    r"returned an incorrect number of gradients \(expected (?P<expected>\d+), got (?P<got>\d+)\)": (
        "gradient-count",
        "the backward returns {got} gradient{got_s}, but the forward takes {expected} "
        "argument{expected_s}: return a gradient for each argument, in the order of the arguments, "
        "or None for an argument without a gradient",
    ),
    r"returned an invalid gradient at index (?P<index>\d+) - got (?P<got>\[[^\]]*\]) but expected shape "
    r"compatible with (?P<expected>\[[^\]]*\])": (
        "shape",
        "the gradient has the shape {got}, but the input has the shape {expected}",
    ),
    r"returned an invalid gradient at index (?P<index>\d+) - expected (?:type|dtype) (?P<expected>\S+) but "
    r"got (?P<got>\S+)": ("dtype", "the gradient is {got}, but the input is {expected}"),
    r"modified by an inplace operation": (
        "mutates-saved",
        "a tensor was changed in place after it was saved for the backward",
    ),
    r"a leaf Variable that requires grad is being used in an in-place operation": (
        "mutates-input",
        "the operator writes into an argument",
    ),
    r"view size is not compatible|use \.reshape\(\.\.\.\) instead": (
        "layout",
        "the operator calls `view` on a tensor that is not contiguous",
    ),
}
"""Messages of torch's engine, each with the cause that it shows and our text for the fault."""


def _shape_cause(got: str, expected: str) -> str:
    """Cause of a gradient of a wrong shape: not summed over the broadcast dimensions, or another reason."""
    got_sizes, right = _sizes(got), _sizes(expected.partition(",  ")[0].partition(", or")[0])
    if len(got_sizes) < len(right) or got_sizes == right:
        return "shape"
    # A gradient before the sum has more dimensions, or larger dimensions where the input has size one.
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
    """Exception that ends the check: the property cannot run on this machine, for no operator.

    Args:
        reason: The error for the caller.
    """

    def __init__(self, reason: errors.OpsmithError) -> None:
        self.reason = reason
        super().__init__(str(reason))


def refuse_own(error: BaseException) -> None:
    """Raise an exception of the checker itself again: it is a bug of opsmith, not a finding.

    SystemExit is a finding: the operator calls `sys.exit`. KeyboardInterrupt is the user's, except in a child
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
    """The result of a call with its output suppressed, or its exception; one of the checker is raised again.

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
    """First line of an exception's message, without memory addresses.

    Example:
        >>> first_line(ValueError(f"no room in {object()}\\nbuy more"))
        'no room in <object object>'
    """
    # Addresses differ between processes, and the same seed must give the same report.
    return _ADDRESS.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Overlooking:
    """A region that ignores exceptions of the operator, because they are reported elsewhere or expected.

    Example:
        >>> with Overlooking():
        ...     [][0]
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and _is_the_operators(error)


def watched_calls(*more: CodeType) -> Watchdog:
    """A region in which `EndlessCallError` stops a call of the operator that does not return.

    Args:
        more: Code objects of other functions that call it.
    """
    return Watchdog((*CALLS, *more), report_hang if in_child() else None)


CHECKS = ("_check", "_assert")
"""Prefixes of the functions of torch that check arguments."""

RAISE = "RAISE_VARARGS"
"""Opcode of `raise` and `assert`."""

TORCHS = ("aten", "prims", "prim")
"""Namespaces of torch's own operators; other namespaces contain operators of authors."""

_LIBRARY = Path(torch.__file__).parent
_OPSMITH = Path(opsmith.__file__).parent


def attribute_exception(error: Exception, again: Callable[[], Any]) -> bool:
    """True if the operator raises an exception on purpose, or if this cannot be decided.

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
    """True if a line of the operator's own code, or compiled code that it calls, raises the exception."""
    stack = [*_stack(error.__traceback__)]
    return bool(stack) and _is_operators(stack[-1][0])


def within_backward(error: BaseException) -> bool:
    """True if an error of a backward passes code of the operator, such as a class in its reference."""
    return any(_is_operators(frame) for frame, _ in _stack(error.__traceback__))


def of_backward(error: BaseException) -> bool:
    """True if torch's engine, or a backward that it runs, raises the exception after the call returned."""
    engine = {each.__code__ for each in (torch.autograd.grad, torch.autograd.backward)}
    engine.add(capabilities.differentiated.__code__)
    frames = (frame for frame, _ in _stack(error.__traceback__))
    first = next((each for each in frames if each.f_code in engine or _is_operators(each)), None)
    return first is not None and first.f_code in engine


def by_statement(error: BaseException) -> bool:
    """True if a `raise` or `assert` statement of the operator or of torch raises the exception."""
    stack = [*_stack(error.__traceback__)]
    return bool(stack) and _opcode(*stack[-1]) == RAISE


def stated(error: BaseException) -> bool:
    """True if a `raise` or `assert` statement of the operator's own code raises the exception.

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
    """True if a frame of torch calls an author's operator, which may check its arguments."""
    called = frame.f_locals.get("self")
    return is_operator(called) and str(called).partition(".")[0] not in TORCHS


def _raising(again: Callable[[], Any], frame: FrameType, instruction: int) -> Any:
    """The compiled function, without a frame of its own, that raises at an instruction; None if none does."""
    found: list[Any] = []

    def profile(caller: FrameType, event: str, called: Any) -> None:
        if event == "c_exception" and caller.f_code is frame.f_code and caller.f_lasti == instruction:
            found.append(called)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with Overlooking():  # this exception is known already
            again()
    finally:
        _profile_on(before)
    return found[-1] if found else None


def _profile_on(before: Any) -> None:
    """Restore the profiler; cProfile's is not callable in Python 3.11, and must be enabled again."""
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


class WrongFormError(AboutOperatorError):
    """A call returned a wrong structure, so that its tensors cannot be compared.

    Args:
        result: Name of the result.
        got: Description of the returned value.
        expected: Description of the right structure: a list of the reference's length, or the structure that
            a class returned in the run that determined its results.
        where: `file:line` of the code that returned it.
    """

    def __init__(self, result: str, got: str, expected: str, where: str) -> None:
        super().__init__(f"it returns {got}, but {expected}")
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
