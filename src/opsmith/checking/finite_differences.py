"""What gradcheck's verdict means: which input, which element, and what it looks like."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.derivative import Results, finite_difference, vjp
from opsmith.checking.diagnosis import explain_difference
from opsmith.checking.difference import Difference, off_gradcheck
from opsmith.checking.differentiated import rule_place
from opsmith.checking.numerical import cause_of
from opsmith.checking.probes import plain_probe
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.formula import Formula

HIDES = (
    "autograd through the reference gives the same, so the reference hides a dependence from autograd "
    "(`.detach()`, `no_grad`, `.data`) or has no derivative there"
)
RESULTS = (
    "it is what finite differences of the reference say, so the results are wrong, and not the gradient: "
    "see `forward`"
)


def numerical_failure(
    check: str, subject: Subject, sample: Sample, places: Sequence[int], text: str, *, compared: bool
) -> Failure:
    """The failure for a gradient that gradcheck rejects.

    Args:
        check: Name of the property.
        subject: What is under check.
        sample: The sample.
        places: The inputs that were differentiated by.
        text: What gradcheck said.
        compared: Whether the gradient was found to be that of autograd through the reference.
    """
    evidence = {"sample": f"{sample} in float64", "gradcheck": text}
    names = ", ".join(sample.labels[place] for place in places)
    where = rule_place(subject, sample.names[places[0]])
    other = cause_of(text)
    if other == "nondeterministic":
        message = f"two backwards with the same incoming gradient give different gradients of `{names}`"
        return Failure(check, names, other, message, where, evidence)
    for place in places:
        found = finite_difference_fault(subject, sample, place, partial(subject.call, sample))
        if found is None:
            continue
        difference, cause, reason = found
        label, name = sample.labels[place], sample.names[place]
        if not subject.specification.opaque:
            if finite_difference_fault(subject, sample, place, subject.plain(sample)) is None:
                cause, reason = "kernel-mismatch", RESULTS
            elif compared or not isinstance(subject.specification.gradients.rules.get(name), Formula):
                reason = HIDES
        message = f"the gradient of `{label}` is not what finite differences say: {difference}"
        message += f"; {reason}" if reason else ""
        where = rule_place(subject, name)
        return Failure(check, label, cause, message, where, {**evidence, **difference.evidence()})
    message = f"gradcheck rejects the gradient by `{names}`: {text}"
    return Failure(check, names, other or UNKNOWN, message, where, evidence)


def finite_difference_fault(
    subject: Subject, sample: Sample, place: int, function: Results
) -> tuple[Difference, str, str] | None:
    """The worst element of the operator's gradient against finite differences, and what it looks like.

    Args:
        subject: What is under check.
        sample: The sample.
        place: The input to differentiate by.
        function: What to take finite differences of: the operator, or its reference.
    """
    flat = sample.at(torch.float64)
    with torch.no_grad():
        grads = plain_probe(subject, sample, subject.call(sample, flat)).grads
    expected = finite_difference(torch.no_grad()(function), flat, place, grads)
    found = vjp(partial(subject.call, sample), sample.at(torch.float64), (place,), grads)
    got = found[0] if found else None
    difference = off_gradcheck(torch.zeros_like(expected) if got is None else got, expected)
    return None if difference is None else (difference, *explain_difference(got, expected))
