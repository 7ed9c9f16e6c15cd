"""Surrogate gradients: form, linearity, and the stated stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated, rule_location
from opsmith.checking.causes import CAUSES, UNKNOWN
from opsmith.checking.diagnosis import explain_difference
from opsmith.checking.numerics.answer import Computation
from opsmith.checking.numerics.autodiff import vjp, vjp_or_zeros
from opsmith.checking.numerics.compare import metadata_difference
from opsmith.checking.numerics.judge import judge
from opsmith.checking.properties.numeric.differentiable import given_instead, not_exercised
from opsmith.checking.properties.numeric.frozen_parameters import frozen_parameters
from opsmith.checking.properties.numeric.linearity import WHY, OwnBackward, departure
from opsmith.checking.property import Findings, Note, Property, Skipped, each_sample
from opsmith.checking.report import Failure, Given
from opsmith.checking.samples.cases import ALWAYS_CHECKED, Case, case_name, cases
from opsmith.checking.samples.grad_outputs import GradOutputs, contiguous_grad_outputs
from opsmith.checking.samples.sample import CPU, Sample
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import of_own_apply, through_apply

NAME = "surrogate"


def run(subject: Subject) -> Findings:
    """Check form, linearity and stand-in of the surrogate gradients on every sample."""
    if not subject.specification.gradients.surrogate:
        yield Skipped("the operator has no surrogate gradients")
        return
    seen: set[str] = set()
    instead: dict[str, str] = {}
    found = [*each_sample(NAME, partial(_sample, seen=seen, instead=instead), subject)]
    found += not_exercised(NAME, subject, instead, seen, "surrogate gradient")
    found += frozen_parameters(NAME, subject)
    own = through_apply(subject)
    if own is not None and not any(isinstance(finding, Failure) for finding in found):
        found += [
            of_own_apply(each, subject)
            for each in each_sample(NAME, _form_of_each, own)
            if isinstance(each, Failure)
        ]
    yield from found
    if not seen and not any(isinstance(finding, Failure) for finding in found):
        yield Skipped("no sample has an input to differentiate by: add one with floating tensors")


def _sample(subject: Subject, sample: Sample, seen: set[str], instead: dict[str, str]) -> Findings:
    argnums = differentiated(subject, sample).argnums
    instead.update(given_instead(subject, sample))
    seen.update(sample.names[argnum] for argnum in argnums)
    if not argnums:
        return
    results = subject.call(sample, sample.in_double())
    plain = contiguous_grad_outputs(subject, sample, results)
    for argnum in argnums:
        gradient = partial(_gradient, subject, sample, argnum)
        yield from _form(subject, sample, argnum, gradient, plain)
        yield from _precision(subject, sample, argnum, gradient, plain)
        if subject.linear:
            yield from _linear(subject, sample, argnum, plain)
        else:
            yield Note("linearity in grad_output was left out: it is declared not to be linear")
    if subject.specification.gradients.stand_in is not None:
        yield from _stand_in(subject, sample, argnums, plain)


def _form_of_each(subject: Subject, sample: Sample) -> Findings:
    """Check the form of each gradient alone, which torch's engine checks, too."""
    argnums = () if sample.origin else differentiated(subject, sample).argnums
    if argnums:
        results = subject.call(sample, sample.in_double())
        plain = contiguous_grad_outputs(subject, sample, results)
        for argnum in argnums:
            yield from _form(subject, sample, argnum, partial(_gradient, subject, sample, argnum), plain)


def _gradient(
    subject: Subject,
    sample: Sample,
    argnum: int,
    grads: Sequence[Tensor | None],
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
) -> Tensor | None:
    return vjp(partial(subject.call, sample), sample.at(dtype, device), (argnum,), grads)[0]


def _form(
    subject: Subject, sample: Sample, argnum: int, gradient: Any, grad_outputs: GradOutputs
) -> Findings:
    for dtype in ALWAYS_CHECKED:
        for device in subject.devices_with(dtype):
            got = gradient(grad_outputs.at(dtype, device), dtype, device)
            like = sample.at(dtype, device)[argnum]
            if got is None:
                yield _failure(subject, sample, argnum, "missing-gradient", "there is none (None)", {})
                return
            fault = metadata_difference(got, like, strides=False)
            if fault is not None:
                aspect, actual, right = fault
                what = f"it has the {aspect} {actual}, and the input {right}"
                cause = aspect if aspect in CAUSES else UNKNOWN
                yield _failure(subject, sample, argnum, cause, what, {"got": actual, "expected": right})
                return


def _precision(
    subject: Subject, sample: Sample, argnum: int, gradient: Any, grad_outputs: GradOutputs
) -> Findings:
    """Check that float64 stays float64: the gradient is not made of float32 numbers, and blind to others.

    A gradient that rounds on purpose ignores larger changes of grad_output, too.
    """
    grads = grad_outputs.in_double()
    if subject.single_precision or not any(grad is not None for grad in grads):
        return

    def with_grads(change: Callable[[Tensor], Tensor]) -> Tensor | None:
        return gradient([None if grad is None else change(grad) for grad in grads])  # type: ignore[no-any-return]

    got, moved = with_grads(torch.clone), with_grads(lambda grad: grad * (1 + 2.0**-10))
    blind = (with_grads(to_float32), with_grads(lambda grad: grad * (1 + 2.0**-40)))
    if got is None or moved is None or not got.isfinite().all() or torch.equal(got, moved):
        return
    if torch.equal(to_float32(got), got) and all(
        each is not None and torch.equal(each, got) for each in blind
    ):
        what = (
            "in float64 it is a float32 number in every element, and blind to smaller changes of grad_output"
        )
        evidence = {"sample": case_name(sample, torch.float64, CPU), "eps of float32": FLOAT32_EPS}
        yield _failure(subject, sample, argnum, "precision", what, evidence)


def to_float32(tensor: Tensor) -> Tensor:
    """Round to the numbers of float32."""
    return tensor.to(torch.complex64 if tensor.is_complex() else torch.float32).to(tensor.dtype)


FLOAT32_EPS = torch.finfo(torch.float32).eps


def _linear(subject: Subject, sample: Sample, argnum: int, grad_outputs: GradOutputs) -> Findings:
    """Check linearity in grad_output, which sums of losses and accumulated gradients need."""
    first = grad_outputs.in_double()
    second = [None if grad is None else grad.flip(tuple(range(grad.dim()))) + 0.5 for grad in first]
    backward = OwnBackward(subject, sample, argnum)
    if backward(first) is None or backward(second) is None:
        return
    found = departure(backward.answer, *((grads, backward.answer(grads)) for grads in (first, second)))
    if found is not None:
        words, verdict = found
        assert verdict.difference is not None
        what = f"for {words}, {verdict}; {WHY}"
        yield _failure(subject, sample, argnum, "nonlinear-grad", what, verdict.difference.evidence())


def _stand_in(
    subject: Subject, sample: Sample, argnums: tuple[int, ...], grad_outputs: GradOutputs
) -> Findings:
    stand_in = subject.specification.gradients.stand_in
    count = len(sample.flat)

    def right(values: list[Any]) -> list[Tensor]:
        return vjp_or_zeros(subject.plain(sample, stand_in), values[:count], argnums, values[count:])

    values = [*sample.in_double(), *grad_outputs.grads]
    gradients = Computation.of(right, values, subject.generator(), has_truth=not subject.specification.random)

    def arguments(dtype: torch.dtype, device: torch.device) -> list[Any]:
        return [*sample.at(dtype, device), *grad_outputs.at(dtype, device)]

    for case in cases(subject, sample, gradients, ALWAYS_CHECKED, arguments):
        if isinstance(case, Note):
            yield case
            continue
        for position, argnum in enumerate(argnums):
            yield from _as_stand_in(case, argnum, position, grad_outputs)


def _as_stand_in(case: Case, argnum: int, position: int, grad_outputs: GradOutputs) -> Findings:
    subject, sample = case.subject, case.sample
    got = _gradient(
        subject, sample, argnum, grad_outputs.at(case.dtype, case.device), case.dtype, case.device
    )
    right = case.answers[position]
    if got is None or right.value is None:
        return
    verdict = judge(got, right)
    if verdict.difference is not None:
        looks, reason = explain_difference(got.cpu(), right.value)
        what = f"it is not that of the stand-in: {verdict}" + (f"; {reason}" if reason else "")
        yield _failure(subject, sample, argnum, looks, what, verdict.difference.evidence())


def _failure(
    subject: Subject, sample: Sample, argnum: int, cause: str, what: str, evidence: dict[str, Any]
) -> Failure:
    label = sample.labels[argnum]
    message = f"the surrogate gradient of `{label}` is wrong: {what}"
    given: Given = "unpromised" if cause in ("nonlinear-grad", "missing-gradient") else "usual"
    return Failure(
        NAME,
        label,
        cause,
        message,
        rule_location(subject, sample.names[argnum]),
        {"sample": str(sample), **evidence},
        given=given,
    )


SURROGATE = Property(NAME, "surrogate gradients are linear, and those of their stand-in", run)
