"""What a wrong gradient looks like, in words and with a replay."""

from __future__ import annotations

import torch

from opsmith.checking.case import Case
from opsmith.checking.difference import Difference
from opsmith.checking.differentiated import rule_place
from opsmith.checking.layouts import HANDED_BACK_BY
from opsmith.checking.probes import Probe
from opsmith.checking.replay import call_code, replay, visible_code
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject


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
        gradient_replay(case.subject, case.sample, place, probe, case.dtype, case.device),
    )


def gradient_replay(
    subject: Subject, sample: Sample, place: int, probe: Probe, dtype: torch.dtype, device: torch.device
) -> str | None:
    """One backward of the operator and of the reference, for an operator that has a single visible result."""
    name = sample.names[place]
    if (
        not subject.specification.schema.always_tensors
        or len(subject.specification.schema.visible) > 1
        or subject.specification.opaque
        or sample.labels[place] != name
    ):
        return None
    flat = sample.at(dtype, device)
    flat[place].requires_grad_()
    got, expected = visible_code(subject, 0, call_code(sample))
    (grad,) = probe.at(dtype, device)
    assert grad is not None
    ending = [
        f"(got,) = torch.autograd.grad({got}, {name}, grad)",
        f"(expected,) = torch.autograd.grad({expected}, {name}, grad)",
        "torch.testing.assert_close(got, expected)",
    ]
    return replay(subject, sample, flat, ending, {"grad": grad})
