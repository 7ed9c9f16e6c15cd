"""The results of a run beside the truth: first their form, then their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from opsmith.checking.causes import CAUSES, UNKNOWN
from opsmith.checking.diagnosis import explain_difference
from opsmith.checking.numerics.compare import form_fault
from opsmith.checking.property import Findings
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import Case
from opsmith.checking.samples.sample import is_inexact


def compared(
    check: str,
    case: Case,
    results: Sequence[Tensor | None],
    positions: Sequence[int],
    what: str,
    where: str,
    replay: Callable[[int], str | None],
) -> Findings:
    """Hold results to the truth.

    Args:
        check: Name of the property.
        case: The sample, its dtype and what is right.
        results: What came.
        positions: Which of all results they are.
        what: What they are from, in messages.
        where: `file:line` of that.
        replay: A script that shows that the result at a position is wrong.
    """
    for got, position in zip(results, positions, strict=True):
        name = case.subject.every(case.sample)[position].name
        expected, right = case.truth.ordinary[position], case.truth.right[position]
        if got is None and expected is None:
            continue
        if got is None or expected is None:
            mine, theirs = ("no" if value is None else "a" for value in (got, expected))
            message = f"{what} returns {mine} tensor for `{name}`, and the reference returns {theirs} tensor"
            yield Failure(check, name, "kernel-mismatch", message, where, {"sample": str(case)})
            continue
        assert right is not None
        fault = form_fault(got, expected, strides=False)
        if fault is not None:
            aspect, mine, theirs = fault
            message = f"{what} returns `{name}` with the {aspect} {mine}, and the reference with {theirs}"
            evidence = {"sample": str(case), "got": mine, "expected": theirs}
            cause = aspect if aspect in CAUSES else "kernel-mismatch"
            yield Failure(check, name, cause, message, where, evidence)
            continue
        difference = case.truth.judge(position, got)
        if difference is None:
            continue
        looks, reason = explain_difference(got.cpu(), right) if is_inexact(got) else (UNKNOWN, "")
        cause = looks if looks in ("nan", "precision") else "kernel-mismatch"
        like = {"looks like": looks} if looks not in (cause, UNKNOWN) else {}
        yield Failure(
            check,
            name,
            cause,
            f"`{name}` from {what} is wrong: {difference}" + (f"; {reason}" if reason else ""),
            where,
            {"sample": str(case), **difference.evidence(), **like},
            replay(position),
        )
