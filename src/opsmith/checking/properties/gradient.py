"""The gradients are right: against autograd through the reference, and against finite differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck

from opsmith.checking.case import WIDE, Case, cases
from opsmith.checking.derivative import vjp, with_gradient
from opsmith.checking.differentiated import (
    Differentiated,
    adopted_takes,
    differentiated,
    given_instead,
    nothing_to_differentiate,
    rule_place,
)
from opsmith.checking.finite_differences import numerical_failure
from opsmith.checking.gradient_failure import AGREE, wrong_gradient, wrong_layout
from opsmith.checking.numerical import large_note, numerical_fault, too_large
from opsmith.checking.probes import Probe, probes
from opsmith.checking.property import Finding, Findings, Note, Property, Skipped, each_sample, raised
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.checking.truth import Measure

NAME = "gradient"


@dataclass
class Seen:
    """What one run has looked at so far.

    Args:
        differentiated: Inputs that were differentiated by.
        refused: Inputs that have no gradient to check, and why.
        instead: Inputs with a formula, and what a sample gave instead of floating numbers.
        failed: Whether anything was wrong.
    """

    differentiated: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)
    failed: bool = False


def run(subject: Subject) -> Findings:
    """Differentiate every sample by each input alone and by all together.

    Where there is verifiably nothing to differentiate (no result requires a gradient, though every floating
    input does), the property holds, and a note says so.
    """
    if subject.specification.gradients.surrogate:
        yield Skipped("the gradients are surrogates, wrong on purpose; the property `surrogate` holds them")
        return
    seen = Seen()
    for finding in each_sample(NAME, subject, partial(_sample, seen=seen)):
        seen.failed = seen.failed or isinstance(finding, Failure)
        yield finding
    for name, given in seen.instead.items():
        if name in seen.differentiated:
            continue
        if adopted_takes(subject, given):
            yield Note(f"no sample differentiates `{name}`, which is {given}")
            continue
        seen.failed = True
        message = (
            f"no sample differentiates `{name}`, so nothing has looked at its gradient formula: expected a "
            f"floating tensor in at least one sample, got {given}"
        )
        yield Failure(NAME, name, "not-exercised", message, rule_place(subject, name))
    if seen.differentiated or seen.failed:
        yield from (Note(reason) for reason in seen.refused.values())
    elif seen.refused:
        yield Skipped("; ".join(seen.refused.values()))
    elif nothing_to_differentiate(subject):
        yield Note("nothing to differentiate: no result requires a gradient in any sample")
    else:
        yield Skipped("no sample has an input to differentiate by: add one with floating tensors")


def _sample(subject: Subject, sample: Sample, seen: Seen) -> Findings:
    inputs = differentiated(subject, sample)
    seen.refused.update(inputs.refused)
    for name, given in given_instead(subject, sample).items():
        seen.instead[name] = given
        if given != "None":
            yield Note(f"sample {sample.position} does not differentiate `{name}`, which is {given}")
    if not inputs.places:
        return
    seen.differentiated.update(sample.names[place] for place in inputs.places)
    wrong: set[int] = set()
    followed = subject.specification.opaque or _follows(subject, sample, inputs.places)
    own = subject.specification.opaque
    if followed:
        found = [*_against_reference(subject, sample, inputs, wrong, own=own)]
        if _adopted_alone(subject) and any(_against_forward(finding) for finding in found):
            own = True
            wrong.clear()
            yield Note(FORWARD_IS_NO_TRUTH)
            found = [*_against_reference(subject, sample, inputs, wrong, own=own)]
        yield from found
    else:
        yield Note(
            "the reference was left out: autograd does not follow it, so finite differences alone decide; "
            "if it is not made of torch operations, declare it with `opaque=True`"
        )
    large = too_large(subject, sample, inputs.places)
    if large:
        yield Note(large_note(sample))
    for device in subject.devices_with(torch.float64):
        for subset in inputs.subsets():
            if wrong.intersection(subset):
                continue  # what is known to be wrong needs no second message
            for fast in (True,) if large else (False, True):
                text = numerical_fault(gradcheck, subject, sample, subset, device, fast_mode=fast)
                if text is not None:
                    wrong.update(subset if len(subset) == 1 else ())
                    compared = followed and not own
                    yield numerical_failure(NAME, subject, sample, subset, text, compared=compared)
                    break


FORWARD_IS_NO_TRUTH = (
    "autograd through the forward was left out: it gives another gradient than the backward, which finite "
    "differences agree with; a forward that rounds to float32 on the way, or detaches something, does this"
)


def _adopted_alone(subject: Subject) -> bool:
    """Whether the reference is the forward of a Function class, which its author never meant for autograd."""
    adopted = subject.specification.adopted
    return adopted is not None and adopted.reference is None


def _against_forward(finding: Finding) -> bool:
    return isinstance(finding, Failure) and finding.evidence.get("finite differences") == AGREE


def _follows(subject: Subject, sample: Sample, places: Sequence[int]) -> bool:
    """Whether autograd follows the reference from these inputs to any result."""
    with torch.enable_grad():
        flat = sample.at(torch.float64)
        for place in places:
            flat[place].requires_grad_()
        return any(with_gradient(result) for result in subject.plain(sample)(flat))


def _against_reference(
    subject: Subject, sample: Sample, inputs: Differentiated, wrong: set[int], *, own: bool
) -> Findings:
    results = subject.call(sample, sample.at(torch.float64))
    for probe in probes(subject, sample, results):
        right = partial(_right, subject, sample, inputs.places, own)
        values = [*sample.at(torch.float64), *probe.grads]
        measure = Measure.of(right, values, subject.generator(), has_truth=subject.has_truth)

        def arguments(dtype: torch.dtype, device: torch.device, probe: Probe = probe) -> list[Any]:
            return [*sample.at(dtype, device), *probe.at(dtype, device)]

        for case in cases(subject, sample, measure, WIDE, arguments):
            if isinstance(case, Note):
                yield case
                continue
            for subset in inputs.subsets():
                yield from _compare(case, inputs, subset, probe, wrong)


def _right(
    subject: Subject, sample: Sample, places: Sequence[int], own: bool, values: list[Any]
) -> list[Tensor]:
    """The right gradients: autograd's through the reference, or the operator's own, of contiguous ones."""
    count = len(sample.flat)
    flat, grads = values[:count], values[count:]
    if own:
        found = vjp(
            partial(subject.call, sample), flat, places, [g if g is None else g.contiguous() for g in grads]
        )
    else:
        found = vjp(subject.plain(sample), flat, places, grads)
    found = found or [None] * len(places)
    return [
        torch.zeros_like(flat[place]) if gradient is None else gradient
        for place, gradient in zip(places, found, strict=True)
    ]


def _compare(
    case: Case, inputs: Differentiated, subset: tuple[int, ...], probe: Probe, wrong: set[int]
) -> Findings:
    """One backward against the truth: values, and for odd layouts whether a contiguous gradient goes well."""
    subject, sample = case.subject, case.sample
    grads = probe.at(case.dtype, case.device)
    if not probe.plain and wrong.intersection(subset):
        return
    try:
        found = vjp(partial(subject.call, sample), case.flat(), subset, grads) or [None] * len(subset)
    except Exception as error:
        wrong.update(subset)
        label = ", ".join(sample.labels[place] for place in subset)
        failure = raised(NAME, subject, error, str(case), label)
        yield failure if probe.plain else wrong_layout(NAME, case, subset[0], probe, failure.message)
        return
    for place, got in zip(subset, found, strict=True):
        if place in wrong:
            continue
        position = inputs.places.index(place)
        mine = torch.zeros_like(case.flat()[place]) if got is None else got
        difference = case.truth.judge(position, mine)
        if difference is None:
            continue
        wrong.add(place)
        if probe.plain:
            yield wrong_gradient(NAME, case, place, position, subset, probe, got, difference)
        else:
            yield wrong_layout(NAME, case, place, probe, str(difference), difference)


GRADIENT = Property(NAME, "the gradient of every input is right, in every layout", run)
