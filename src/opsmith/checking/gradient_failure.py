"""What a wrong gradient looks like, in words and with a replay."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.case import Case
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.derivative import vjp
from opsmith.checking.difference import Difference
from opsmith.checking.differentiated import rule_place
from opsmith.checking.finite_differences import finite_difference_fault
from opsmith.checking.hypotheses import explain_difference
from opsmith.checking.layouts import HANDED_BACK_BY
from opsmith.checking.probes import Probe
from opsmith.checking.replay import call_code, replay, visible_code
from opsmith.checking.report import Failure

AGREE = "agree with it"
"""What finite differences say of a gradient, where it is the reference's own that is wrong."""


def wrong_gradient(
    check: str,
    case: Case,
    place: int,
    position: int,
    subset: tuple[int, ...],
    probe: Probe,
    got: Tensor | None,
    difference: Difference,
) -> Failure:
    """The failure for a gradient that is not the right one.

    Args:
        check: Name of the property.
        case: What was run.
        place: The input whose gradient is wrong.
        position: Where its right gradient stands in the case's truth.
        subset: The inputs that were differentiated by together.
        probe: What came in.
        got: What came out.
        difference: Its worst element.
    """
    subject, sample = case.subject, case.sample
    label = sample.labels[place]
    right = case.truth.right[position]
    assert right is not None
    cause, reason = explain_difference(None if got is None else got.cpu(), right)
    evidence: dict[str, Any] = {
        "sample": str(case),
        "incoming gradient": probe.name,
        **difference.evidence(),
    }
    if _ignores(case, place, probe, got):
        cause, reason = "ignores-grad-output", "it stays the same when the incoming gradient is doubled"
    if case.dtype == torch.float64 and not subject.specification.opaque:
        numbers = finite_difference_fault(subject, sample, place, subject.plain(sample))
        evidence["finite differences"] = AGREE if numbers is None else "say so too"
        if numbers is None:
            cause = UNKNOWN
            reason = "finite differences agree with it, so autograd through the reference is what is wrong"
    together = "" if len(subset) == 1 else " (when all inputs need one)"
    message = f"the gradient of `{label}` is wrong{together}: {difference}"
    return Failure(
        check,
        label,
        cause,
        message + (f"; {reason}" if reason else ""),
        rule_place(subject, sample.names[place]),
        evidence,
        _replay(case, place, probe),
    )


def wrong_layout(
    check: str, case: Case, place: int, probe: Probe, what: str, difference: Difference | None = None
) -> Failure:
    """The failure for a gradient that is right for a contiguous gradient alone.

    Args:
        check: Name of the property.
        case: What was run.
        place: The input whose gradient is wrong.
        probe: What came in.
        what: What went wrong.
        difference: The worst element, if a gradient came out.
    """
    label = case.sample.labels[place]
    measured = difference.evidence() if difference else {}
    return Failure(
        check,
        label,
        "layout",
        f"the gradient of `{label}` is right for a contiguous incoming gradient and wrong for one that is "
        f"{probe.name}, as {HANDED_BACK_BY[probe.name]} hands it back: {what}; read it by its strides, or "
        "take `grad.contiguous()`",
        rule_place(case.subject, case.sample.names[place]),
        {"sample": str(case), "incoming gradient": probe.name, **measured},
        _replay(case, place, probe),
    )


def _ignores(case: Case, place: int, probe: Probe, got: Tensor | None) -> bool:
    """Whether the gradient stays the same when twice as much comes in."""
    if got is None or not got.any():
        return False
    doubled = [None if grad is None else 2 * grad for grad in probe.at(case.dtype, case.device)]
    try:
        again = vjp(partial(case.subject.call, case.sample), case.flat(), (place,), doubled)
    except errors.OpsmithError:
        return False
    return again is not None and again[0] is not None and torch.equal(again[0], got)


def _replay(case: Case, place: int, probe: Probe) -> str | None:
    """One backward of the operator and of the reference, for an operator that has a single visible result."""
    subject, sample = case.subject, case.sample
    name = sample.names[place]
    if (
        not subject.specification.schema.always_tensors
        or len(subject.specification.schema.visible) > 1
        or subject.specification.opaque
        or sample.labels[place] != name
    ):
        return None
    flat = case.flat()
    flat[place].requires_grad_()
    got, expected = visible_code(subject, 0, call_code(sample))
    (grad,) = probe.at(case.dtype, case.device)
    assert grad is not None
    ending = [
        f"(got,) = torch.autograd.grad({got}, {name}, grad)",
        f"(expected,) = torch.autograd.grad({expected}, {name}, grad)",
        "torch.testing.assert_close(got, expected)",
    ]
    return replay(subject, sample, flat, ending, {"grad": grad})
