"""What an exception of an operator says is wrong: some name the fault, and others only that there is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from opsmith import errors


@dataclass(frozen=True)
class Named:
    """The fault that an exception names.

    Args:
        cause: The word for it.
        reason: It in a sentence; empty where the exception's own words say it.
        position: Position of the input whose gradient it is about, among those that autograd sees.
    """

    cause: str
    reason: str = ""
    position: int | None = None


def named_by(error: BaseException) -> Named:
    """The fault that an exception names; `raises` where it names none.

    Example:
        >>> text = "function FBackward returned an incorrect number of gradients (expected 2, got 1)"
        >>> named_by(RuntimeError(text)).cause
        'gradient-count'
    """
    for kind, cause in _OURS.items():
        if isinstance(error, kind):
            return Named(cause)
    if isinstance(error, errors.MutationError):
        written = error.argument or ""
        return Named("mutates-grad-output" if written.startswith("grad") else "mutates-input")
    if isinstance(error, errors.GradientShapeError):
        return Named(_shape_cause(str(error.got or ""), str(error.expected or "")))
    text = str(error)
    for pattern, name in _TORCHS.items():
        found = re.search(pattern, text)
        if found is not None:
            return name(found)
    return Named("raises")


_OURS: dict[type[errors.OpsmithError], str] = {
    errors.GradientCountError: "gradient-count",
    errors.GradientDtypeError: "dtype",
    errors.SavedTensorModifiedError: "mutates-saved",
    errors.AliasError: "aliases-input",
    errors.GraphCutError: "second-order",
    errors.IntegerResultError: "dtype",
}
"""Errors of ours that each stand for one fault."""


def _count(found: re.Match[str]) -> Named:
    expected, got = int(found["expected"]), int(found["got"])
    reason = (
        f"the backward returns {got} gradient{'s' * (got != 1)}, and the forward takes {expected} "
        f"argument{'s' * (expected != 1)}: return one for each, in their order, and None for what has none"
    )
    return Named("gradient-count", reason)


def _invalid(found: re.Match[str]) -> Named:
    got, expected, position = found["got"], found["expected"], int(found["index"])
    cause = _shape_cause(got, expected)
    reason = f"the gradient has the shape {got}, and the input {expected}"
    if cause == "unreduced-broadcast":
        reason += ": sum it over the dimensions along which the input was repeated"
    return Named(cause, reason, position)


def _invalid_dtype(found: re.Match[str]) -> Named:
    return Named(
        "dtype", f"the gradient is {found['got']}, and the input {found['expected']}", int(found["index"])
    )


_TORCHS: dict[str, Callable[[re.Match[str]], Named]] = {
    r"returned an incorrect number of gradients \(expected (?P<expected>\d+), got (?P<got>\d+)\)": _count,
    r"returned an invalid gradient at index (?P<index>\d+) - got (?P<got>\[[^\]]*\]) but expected shape "
    r"compatible with (?P<expected>\[[^\]]*\])": _invalid,
    r"returned an invalid gradient at index (?P<index>\d+) - expected (?:type|dtype) (?P<expected>\S+) but "
    r"got (?P<got>\S+)": _invalid_dtype,
    r"modified by an inplace operation": lambda found: Named(
        "mutates-saved", "something that was saved for the backward was written into after it was saved"
    ),
    r"a leaf Variable that requires grad is being used in an in-place operation": lambda found: Named(
        "mutates-input", "it writes into an argument"
    ),
    r"view size is not compatible|use \.reshape\(\.\.\.\) instead": lambda found: Named(
        "layout", "it takes a view of a tensor that is not contiguous"
    ),
}
"""What torch's engine says of a fault, and the fault."""


def _shape_cause(got: str, expected: str) -> str:
    """Whether a gradient of a wrong shape is one that was not summed over what was broadcast."""
    mine, right = _sizes(got), _sizes(expected.partition(",  ")[0].partition(", or")[0])
    if len(mine) < len(right) or mine == right:
        return "shape"
    # What was broadcast is longer, or larger where the input has one: what is left over must be the input.
    left = list(mine)
    for size in right:
        if size in left:
            left.remove(size)
        elif size != 1:
            return "shape"
    return "unreduced-broadcast" if left else "shape"


def _sizes(text: str) -> list[int]:
    found = re.match(r"\[([^\]]*)\]", text)
    return [int(each) for each in found[1].split(",") if each.strip()] if found else []
