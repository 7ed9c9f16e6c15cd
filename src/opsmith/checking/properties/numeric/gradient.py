"""Gradients against autograd through the reference, and against finite differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import Differentiated, computed_in, differentiated, refusals_in
from opsmith.checking.causes import CAUSES
from opsmith.checking.exceptions import refuse_own, stated
from opsmith.checking.numerics.answer import Computation
from opsmith.checking.numerics.autodiff import differentiate, record, vjp
from opsmith.checking.numerics.finite_differences import NumericalGradient
from opsmith.checking.numerics.judge import judge
from opsmith.checking.properties.numeric.differentiable import (
    given_instead,
    lacks_floats,
    not_exercised,
    nothing_to_differentiate,
    promises_gradients,
)
from opsmith.checking.properties.numeric.frozen_parameters import frozen_parameters
from opsmith.checking.properties.numeric.gradient_truth import RightGradient
from opsmith.checking.properties.numeric.gradient_verdict import NAME, Attempt, conclude, reference_failure
from opsmith.checking.properties.numeric.ties import where_tied
from opsmith.checking.property import REFUSED, Finding, Findings, Note, Property, Skipped, each_sample
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
        differentiated: Inputs that were differentiated by.
        refused: Inputs that have no gradient to check, why, and in which sample first.
        instead: Inputs with a formula, and what a sample gave instead of floating numbers.
        failed: True if anything was wrong.
        wrong: Inputs whose gradient is wrong on the author's samples, for which derived samples are skipped.
        right: For each input the author's samples on which its gradient is right.
        confirmed: True if finite differences confirm autograd through the reference on every sample so far.
        samples: Number of differentiated samples.
        decided: True if the right gradient was known in at least one element of one sample.
    """

    differentiated: set[str] = field(default_factory=set)
    refused: dict[str, tuple[str, Sample]] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)
    failed: bool = False
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
    for finding in [*each_sample(NAME, partial(_sample, seen=seen), subject)]:
        seen.failed = seen.failed or isinstance(finding, Failure)
        found = _with_right_samples(_wants_distinct(finding, subject), seen)
        yield where_tied(found, subject) if isinstance(found, Failure) else found
    more = not_exercised(NAME, subject, seen.instead, seen.differentiated, "gradient formula")
    for finding in chain(more, frozen_parameters(NAME, subject)):
        seen.failed = seen.failed or isinstance(finding, Failure)
        yield finding
    if seen.differentiated and not seen.failed and not seen.decided:
        yield Skipped(WITHOUT_ELEMENTS if lacks_floats(subject) else UNDECIDED)
    elif seen.differentiated or seen.failed:
        yield from _about_refused(subject, seen)
    elif seen.refused:
        yield Skipped("; ".join(reason for reason, _ in seen.refused.values()))
    elif not (promises_gradients(subject) and lacks_floats(subject)) and nothing_to_differentiate(subject):
        yield Note("nothing to differentiate: no result requires a gradient in any sample")
    else:
        yield Skipped("no sample has an input to differentiate by: add one with floating tensors")


def _about_refused(subject: Subject, seen: GradientCoverage) -> Findings:
    """Note inputs without a gradient to check; what a class refuses in some samples alone is a limit."""
    some: dict[tuple[str, int], list[str]] = {}
    for name, (reason, sample) in seen.refused.items():
        text = refusals_in(subject, sample).get(name)
        if text is None or name not in seen.differentiated:
            yield Note(reason)
        else:
            some.setdefault((text, sample.position), []).append(name)
    where = subject.specification.where_of("gradient")
    for (text, _), names in some.items():
        evidence = {"sample": str(seen.refused[names[0]][1]), REFUSED: "by an error of its own"}
        yield Failure(NAME, ", ".join(names), "raises", text, where, evidence)


WITHOUT_ELEMENTS = "no sample has a floating tensor with elements: its gradient is not checked"

UNDECIDED = (
    "finite differences decide no element of a gradient in any sample, and nothing else does: give "
    "samples at which the results move smoothly"
)


def _with_right_samples(finding: Finding, seen: GradientCoverage) -> Finding:
    """Add the samples on which the gradient is right to the evidence of a failure."""
    if not isinstance(finding, Failure) or finding.input not in seen.right:
        return finding
    return replace(finding, evidence={**finding.evidence, "right on": ", ".join(seen.right[finding.input])})


def _wants_distinct(finding: Finding, subject: Subject) -> Finding:
    """A warning in place of an error, if the forward keeps one value of those that share an index.

    The right gradient of the others is then zero. A backward that gives one of several gradients to an
    element that was read several times stays an error.
    """
    if not isinstance(finding, Failure) or not CAUSES[finding.cause].numeric:
        return finding
    shown, expected = str(finding.evidence.get("sample", "")), finding.evidence.get("expected")
    if expected != 0 or not any(each.repeats and shown.startswith(str(each)) for each in subject.samples):
        return finding
    words = (
        "the forward keeps one of the values that share an index: if indices must be distinct, refuse others"
    )
    return replace(finding, cause="region", message=f"{finding.message}; {words}", given="strained")


def _sample(subject: Subject, sample: Sample, seen: GradientCoverage) -> Findings:
    inputs = differentiated(subject, sample)
    if sample.origin:
        inputs = replace(
            inputs, argnums=tuple(p for p in inputs.argnums if sample.labels[p] not in seen.wrong)
        )
    for name, reason in inputs.refused.items():
        seen.refused.setdefault(name, (reason, sample))
    for name, given in given_instead(subject, sample).items():
        seen.instead[name] = given
        if given != "None" and not sample.origin:
            yield Note(f"sample {sample.position} does not differentiate `{name}`, which is {given}")
    if not inputs.argnums:
        return
    seen.differentiated.update(sample.names[argnum] for argnum in inputs.argnums)
    right = RightGradient(
        subject,
        sample,
        inputs.argnums,
        confirmed=bool(sample.origin) and seen.confirmed,
        spot_checked=seen.samples >= subject.effort.spot_checked_after,
    )
    seen.samples += 1
    with torch.no_grad():
        results = subject.call(sample, sample.in_double())
    if right.recorded and _has_other_shapes(subject, sample, results):
        yield Note("results of other shapes than the reference's were left out: see `forward`")
        return
    tried = grad_outputs_to_try(subject, sample, results)
    if not sample.origin:
        yield from _about_reference(right, tried[-1])
        seen.confirmed &= all(right.trusted(argnum, tried[-1]) for argnum in right.argnums)
    attempts: list[Attempt] = []
    for grad_outputs in tried:
        for found in _with_grad_outputs(right, inputs, grad_outputs):
            if isinstance(found, Attempt):
                attempts.append(found)
            else:
                yield found
    attempts += _raising_in_few_digits(right, inputs, tried[-1])
    seen.decided = seen.decided or any(
        right.is_known(argnum, grad_outputs) for grad_outputs in tried for argnum in inputs.argnums
    )
    wrong: set[str] = set()
    for finding in conclude(right, attempts):
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
        right = subject.reference(sample, sample.in_double())
    expected = [right[position] for position in subject.visible_positions(sample)]
    # An optional result may be None.
    got, wanted = ([getattr(each, "shape", None) for each in some] for some in (results, expected))
    return got != wanted


def _about_reference(right: RightGradient, grad_outputs: GradOutputs) -> Findings:
    """Note if finite differences alone decide; fail if the derivative of the reference is wrong."""
    subject, sample = right.subject, right.sample
    specification = subject.specification
    if specification.opaque:
        return
    if not right.recorded:
        yield Note(FORWARD_NOT_RECORDED if subject.kind.own_forward else NOT_RECORDED)
        return
    for argnum in right.argnums:
        if right.trusted(argnum, grad_outputs):
            continue
        if subject.kind.own_forward:
            yield Note(FORWARD_IS_NO_TRUTH)
        elif isinstance(specification.gradients.rules.get(sample.names[argnum]), Formula):
            yield from reference_failure(right, argnum, grad_outputs)


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


def _with_grad_outputs(
    right: RightGradient, inputs: Differentiated, grad_outputs: GradOutputs
) -> Iterator[Attempt | Note]:
    """Differentiate by every choice of inputs, in every dtype, on every device, for one grad_output."""
    subject = right.subject
    believed = {argnum: right.trusted(argnum, grad_outputs) for argnum in inputs.argnums}
    known: dict[tuple[torch.dtype, torch.device], dict[bool, Case]] = {}
    for by_reference in sorted(set(believed.values())):
        if not by_reference and not subject.has_truth:
            continue  # the right result in other dtypes is unknown
        for case in _cases(right, grad_outputs, by_reference=by_reference):
            if isinstance(case, Note):
                yield case
            else:
                known.setdefault((case.dtype, case.device), {})[by_reference] = case
    for device in subject.devices_with(torch.float64):
        known.setdefault((torch.float64, device), {})
    for (dtype, device), given in known.items():
        for subset in inputs.subsets(subject.effort):
            grads = grad_outputs.at(dtype, device)
            flat = right.sample.at(dtype, device)
            try:
                found = vjp(partial(subject.call, right.sample), flat, subset, grads)
            except Exception as error:
                refuse_own(error)
                yield Attempt(subset[0], subset, grad_outputs, dtype, device, error=error)
                continue
            for argnum, got in zip(subset, found, strict=True):
                judged_by = given.get(believed[argnum])
                attempt = Attempt(argnum, subset, grad_outputs, dtype, device, got)
                yield _judged(right, attempt, judged_by, believed[argnum])


def _raising_in_few_digits(
    right: RightGradient, inputs: Differentiated, grad_outputs: GradOutputs
) -> Iterator[Attempt]:
    """The backwards that raise by surprise in bfloat16 and float16, where the forward returns.

    Numbers are compared in float64 and float32.
    """
    subject, sample = right.subject, right.sample
    if sample.origin or subject.single_precision:
        return
    seen = {*subject.ran.seen}
    for dtype in (each for each in LOW_PRECISION if sample.takes(each)):
        for device in subject.devices_with(dtype):
            try:
                leaves, _, results = record(
                    partial(subject.call, sample), sample.at(dtype, device), inputs.argnums
                )
            except Exception as error:
                refuse_own(error)
                continue  # `forward` reports it
            pairs = zip(results, grad_outputs.at(dtype, device), strict=True)
            grads = [None if grad is None else grad.to(result.dtype) for result, grad in pairs]
            try:
                differentiate(results, [leaves[argnum] for argnum in inputs.argnums], grads)
            except Exception as error:
                refuse_own(error)
                if not (lacks_dtype(error) or stated(error)):
                    yield Attempt(inputs.argnums[0], inputs.argnums, grad_outputs, dtype, device, error=error)
    subject.ran.seen &= seen  # numbers are not compared there: the report must not say that they passed


def _cases(right: RightGradient, grad_outputs: GradOutputs, *, by_reference: bool) -> list[Case | Note]:
    subject, sample = right.subject, right.sample
    count = len(sample.flat)
    function = right.by_reference if by_reference else right.by_itself
    values = [*sample.in_double(), *grad_outputs.grads]
    gradients = Computation.of(
        lambda given: function(given[:count], given[count:]),
        values,
        subject.generator(),
        has_truth=subject.has_truth,
        computed_in=partial(computed_in, subject, sample, by_reference=by_reference),
        usual=right.usual_size,
    )

    def arguments(dtype: torch.dtype, device: torch.device) -> list[Any]:
        return [*sample.at(dtype, device), *grad_outputs.at(dtype, device)]

    return cases(subject, sample, gradients, ALWAYS_CHECKED, arguments)


def _judged(right: RightGradient, attempt: Attempt, case: Case | None, believed: bool) -> Attempt:
    """Compare a gradient with autograd's through the reference if that is trusted, else with differences."""
    argnum = attempt.argnum
    like = right.sample.at(attempt.dtype, attempt.device)[argnum]
    got = torch.zeros_like(like) if attempt.got is None else attempt.got
    if not believed and attempt.dtype == torch.float64:
        difference = right.judge_by_differences(argnum, attempt.grad_outputs, got.cpu())
        known = right.numerical(argnum, attempt.grad_outputs).known
        return replace(attempt, difference=difference, expected=known)
    if case is None:
        return attempt
    answer = case.answers[right.argnums.index(argnum)]
    expected = answer.value
    assert expected is not None
    # Where autograd itself gives nan, as zero times infinity does, nothing is known.
    got = torch.where(expected.isfinite().to(got.device), got, expected.to(got))
    verdict = judge(got, answer)
    if verdict.wrong:  # at a kink, any value between the one-sided derivatives is right
        between = _between(right.numerical(argnum, attempt.grad_outputs), got.cpu(), expected)
        if bool(between.any()):
            verdict = judge(torch.where(between.to(got.device), expected.to(got), got), answer)
    return replace(attempt, difference=verdict.difference, expected=expected)


def _between(numerical: NumericalGradient, got: Tensor, expected: Tensor) -> Tensor:
    """Mark the elements at a kink that lie between the one-sided derivatives, and so are right."""
    kinks = numerical.kinks & got.isfinite()
    if not bool(kinks.any()):
        return kinks
    return kinks & ~numerical.wrong(torch.where(kinks, got.to(expected.dtype), expected))


GRADIENT = Property(
    NAME,
    "the gradient of every input is right, whatever inputs require one",
    run,
    varied=True,
    differences=True,
    explains_gradients=True,
    sends_gradients=True,
)
