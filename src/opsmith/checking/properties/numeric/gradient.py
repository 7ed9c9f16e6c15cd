"""Gradients against autograd through the reference, and against finite differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.calls import Differentiated, differentiated, refusals_in
from opsmith.checking.causes import CAUSES
from opsmith.checking.exceptions import Overlooking, refuse_own, stated
from opsmith.checking.numerics.autodiff import differentiate, record, vjp
from opsmith.checking.properties.numeric.differentiable import (
    differentiated_names,
    given_instead,
    lacks_floats,
    not_exercised,
    nothing_to_differentiate,
    promises_gradients,
)
from opsmith.checking.properties.numeric.frozen_parameters import frozen_parameters
from opsmith.checking.properties.numeric.gradient_truth import RightGradient, RightGradients
from opsmith.checking.properties.numeric.gradient_verdict import NAME, Attempt, conclude, reference_failure
from opsmith.checking.properties.numeric.ties import where_tied
from opsmith.checking.property import REFUSED, Findings, Note, Property, Skipped, each_sample
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, Case, cases, lacks_dtype
from opsmith.checking.samples.grad_outputs import GradOutputs, grad_outputs_to_try
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.formula import Formula


@dataclass
class GradientCoverage:
    """Progress of one run of the property.

    Args:
        confirmed: True if finite differences confirm autograd through the reference on every sample so far.
        samples: Number of differentiated samples.
        decided: True if the right gradient was known in at least one element of one sample.
        wrong: Inputs whose gradient is wrong on the author's samples, for which derived samples are skipped.
        right: For each input the author's samples on which its gradient is right.
    """

    confirmed: bool = True
    samples: int = 0
    decided: bool = False
    wrong: set[str] = field(default_factory=set)
    right: dict[str, list[str]] = field(default_factory=dict)


def run(subject: Subject) -> Findings:
    """Differentiate every sample by each input alone and by all together.

    Where there is verifiably nothing to differentiate (no result requires a gradient, though every floating
    input does), the property holds, and a note says so.
    """
    if subject.specification.gradients.surrogate:
        yield Skipped("the gradients are surrogates, wrong on purpose; the property `surrogate` holds them")
        return
    seen = GradientCoverage()
    found = [*each_sample(NAME, partial(_sample, seen=seen), subject)]
    found = [_explained(each, subject, seen) if isinstance(each, Failure) else each for each in found]
    found += not_exercised(NAME, subject, "gradient formula")
    found += frozen_parameters(NAME, subject)
    yield from found
    refused = _refused(subject)
    if seen.decided or any(isinstance(each, Failure) for each in found):
        yield from _about_refused(subject, refused)
    elif seen.samples:
        yield Skipped(WITHOUT_ELEMENTS if lacks_floats(subject) else UNDECIDED)
    elif refused:
        yield Skipped("; ".join(reason for reason, _ in refused.values()))
    elif not (promises_gradients(subject) and lacks_floats(subject)) and nothing_to_differentiate(subject):
        yield Note("nothing to differentiate: no result requires a gradient in any sample")
    else:
        yield Skipped("no sample has an input to differentiate by: add one with floating tensors")


def _refused(subject: Subject) -> dict[str, tuple[str, Sample]]:
    """Inputs that have no gradient to check, why, and in which sample first."""
    refused: dict[str, tuple[str, Sample]] = {}
    for sample in subject.samples:
        with Overlooking():  # what a call raises is reported
            for name, reason in differentiated(subject, sample).refused.items():
                refused.setdefault(name, (reason, sample))
    return refused


def _about_refused(subject: Subject, refused: dict[str, tuple[str, Sample]]) -> Findings:
    """Note inputs without a gradient to check; what a class refuses in some samples alone is a limit."""
    some: dict[tuple[str, int], list[str]] = {}
    for name, (reason, sample) in refused.items():
        text = refusals_in(subject, sample).get(name)
        if text is None or name not in differentiated_names(subject):
            yield Note(reason)
        else:
            some.setdefault((text, sample.position), []).append(name)
    where = subject.specification.where_of("gradient")
    for (text, _), names in some.items():
        evidence = {"sample": str(refused[names[0]][1]), REFUSED: "by an error of its own"}
        yield Failure(NAME, ", ".join(names), "raises", text, where, evidence)


WITHOUT_ELEMENTS = "no sample has a floating tensor with elements: its gradient is not checked"

UNDECIDED = (
    "finite differences decide no element of a gradient in any sample, and nothing else does: give "
    "samples at which the results move smoothly"
)


def _explained(failure: Failure, subject: Subject, seen: GradientCoverage) -> Failure:
    """The failure with the samples on which the gradient is right, strained where nobody promised it.

    If the forward keeps one value of those that share an index, the right gradient of the others is zero. A
    backward that gives one of several gradients to an element that was read several times stays an error.
    """
    shown, expected = str(failure.evidence.get("sample", "")), failure.evidence.get("expected")
    repeats = any(each.repeats and shown.startswith(str(each)) for each in subject.samples)
    if CAUSES[failure.cause].numeric and expected == 0 and repeats:
        message = f"{failure.message}; {DISTINCT}"
        failure = replace(failure, cause="region", message=message, given="strained")
    if failure.input in seen.right:
        evidence = {**failure.evidence, "right on": ", ".join(seen.right[failure.input])}
        failure = replace(failure, evidence=evidence)
    return where_tied(failure, subject)


DISTINCT = (
    "the forward keeps one of the values that share an index: if indices must be distinct, refuse others"
)


def _sample(subject: Subject, sample: Sample, seen: GradientCoverage) -> Findings:
    inputs = differentiated(subject, sample)
    if sample.origin:
        left = tuple(argnum for argnum in inputs.argnums if sample.labels[argnum] not in seen.wrong)
        inputs = replace(inputs, argnums=left)
    else:
        for name, given in given_instead(subject, sample).items():
            if given != "None":
                yield Note(f"sample {sample.position} does not differentiate `{name}`, which is {given}")
    if not inputs.argnums:
        return
    rights = RightGradients(
        subject,
        sample,
        inputs.argnums,
        confirmed=bool(sample.origin) and seen.confirmed,
        spot_checked=seen.samples >= subject.effort.spot_checked_after,
    )
    seen.samples += 1
    with torch.no_grad():
        results = subject.call(sample, sample.in_double())
    if rights.recorded and _has_other_shapes(subject, sample, results):
        yield Note("results of other shapes than the reference's were left out: see `forward`")
        return
    tried = grad_outputs_to_try(subject, sample, results)
    plain = [rights.of(argnum, tried[-1]) for argnum in inputs.argnums]
    if not sample.origin:
        yield from _about_reference(rights, plain)
        seen.confirmed &= all(right.trusted for right in plain)
    attempts: list[Attempt] = []
    for grad_outputs in tried:
        for found in _attempts(rights, inputs, grad_outputs):
            if isinstance(found, Attempt):
                attempts.append(found)
            else:
                yield found
    attempts += _raising_in_few_digits(plain[0], inputs.argnums)
    seen.decided = seen.decided or any(
        rights.of(argnum, each).is_known for each in tried for argnum in inputs.argnums
    )
    wrong: set[str] = set()
    for finding in conclude(rights, attempts):
        if isinstance(finding, Failure) and finding.input:
            wrong.update(finding.input.split(", "))
        yield finding
    raising = [attempt.subset for attempt in attempts if attempt.error is not None]
    wrong.update(sample.labels[argnum] for subset in raising if len(subset) == 1 for argnum in subset)
    seen.wrong |= wrong
    wrong.update(sample.labels[argnum] for subset in raising for argnum in subset)
    for label in {sample.labels[argnum] for argnum in inputs.argnums} - wrong if not sample.origin else ():
        seen.right.setdefault(label, []).append(str(sample))


def _has_other_shapes(subject: Subject, sample: Sample, results: list[Tensor]) -> bool:
    """Return True if results and those of the reference differ in shape: no grad_output fits both."""
    with subject.seeded(), torch.no_grad():
        expected = subject.plain(sample)(sample.in_double())
    # An optional result may be None.
    got, wanted = ([getattr(each, "shape", None) for each in some] for some in (results, expected))
    return got != wanted


def _about_reference(rights: RightGradients, plain: Sequence[RightGradient]) -> Findings:
    """Note if finite differences alone decide; fail if the derivative of the reference is wrong."""
    subject, specification = rights.subject, rights.subject.specification
    if specification.opaque:
        return
    if not rights.recorded:
        yield Note(FORWARD_NOT_RECORDED if subject.kind.own_forward else NOT_RECORDED)
        return
    for right in plain:
        if right.trusted:
            continue
        if subject.kind.own_forward:
            yield Note(FORWARD_IS_NO_TRUTH)
        elif isinstance(specification.gradients.rules.get(rights.sample.names[right.argnum]), Formula):
            yield from reference_failure(right)


NOT_RECORDED = (
    "the reference was left out: autograd does not follow it, so finite differences alone decide; if it is "
    "not made of torch operations, declare it with `opaque=True`"
)

FORWARD_NOT_RECORDED = (
    "autograd through the forward was left out, since it does not go through it: finite differences decide"
)

FORWARD_IS_NO_TRUTH = (
    "autograd through the forward was left out: finite differences of it contradict it; a forward that "
    "rounds to float32 on the way, or detaches something, does this"
)


def _attempts(
    rights: RightGradients, inputs: Differentiated, grad_outputs: GradOutputs
) -> Iterator[Attempt | Note]:
    """Differentiate by every choice of inputs, in every dtype, on every device, for one grad_output."""
    subject, sample = rights.subject, rights.sample
    right = {argnum: rights.of(argnum, grad_outputs) for argnum in inputs.argnums}
    known: dict[tuple[torch.dtype, torch.device], dict[bool, Case]] = {}
    for by_reference in sorted({each.trusted for each in right.values()}):
        if not by_reference and not subject.has_truth:
            continue  # the right result in other dtypes is unknown
        gradients = rights.computation(grad_outputs, by_reference=by_reference)
        for case in cases(subject, sample, gradients, ALWAYS_CHECKED, grad_outputs.beside(sample)):
            if isinstance(case, Note):
                yield case
            else:
                known.setdefault((case.dtype, case.device), {})[by_reference] = case
    for device in subject.devices_with(torch.float64):
        known.setdefault((torch.float64, device), {})
    for (dtype, device), given in known.items():
        for subset in inputs.subsets(subject.effort):
            flat, grads = sample.at(dtype, device), grad_outputs.at(dtype, device)
            try:
                found = vjp(partial(subject.call, sample), flat, subset, grads)
            except Exception as error:
                refuse_own(error)
                yield Attempt(right[subset[0]], subset, dtype, device, error=error)
                continue
            for argnum, got in zip(subset, found, strict=True):
                gradient = torch.zeros_like(flat[argnum]) if got is None else got
                attempt = Attempt(right[argnum], subset, dtype, device, gradient)
                yield _judged(attempt, given.get(right[argnum].trusted))


def _judged(attempt: Attempt, case: Case | None) -> Attempt:
    """Compare a gradient with autograd's through the reference if that is trusted, else with differences."""
    right, got = attempt.right, attempt.got
    assert got is not None
    if not right.trusted and attempt.dtype == torch.float64:
        return replace(attempt, expected=right.numerical.known, difference=right.judge(got))
    if case is None:
        return attempt
    answer = case.answers[right.position]
    return replace(attempt, expected=answer.value, difference=right.judge(got, answer))


def _raising_in_few_digits(right: RightGradient, argnums: tuple[int, ...]) -> Iterator[Attempt]:
    """The backwards that raise by surprise in bfloat16 and float16, where the forward returns.

    Numbers are compared in float64 and float32.
    """
    subject, sample = right.among.subject, right.among.sample
    if sample.origin or subject.single_precision:
        return
    seen = {*subject.ran.seen}
    for dtype in (each for each in LOW_PRECISION if sample.takes(each)):
        for device in subject.devices_with(dtype):
            try:
                leaves, _, results = record(partial(subject.call, sample), sample.at(dtype, device), argnums)
            except Exception as error:
                refuse_own(error)
                continue  # `forward` reports it
            pairs = zip(results, right.grad_outputs.at(dtype, device), strict=True)
            grads = [None if grad is None else grad.to(result.dtype) for result, grad in pairs]
            try:
                differentiate(results, [leaves[argnum] for argnum in argnums], grads)
            except Exception as error:
                refuse_own(error)
                if not (lacks_dtype(error) or stated(error)):
                    yield Attempt(right, argnums, dtype, device, error=error)
    subject.ran.seen &= seen  # numbers are not compared there: the report must not say that they passed


GRADIENT = Property(
    NAME,
    "the gradient of every input is right, whatever inputs require one",
    run,
    inputs="every",
    traits=("differences", "explains-gradients", "sends-gradients"),
)
