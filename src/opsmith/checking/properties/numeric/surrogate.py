"""Surrogate gradients: their form, linearity, and agreement with the declared stand-in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.causes import CAUSES, UNKNOWN
from opsmith.checking.diagnosis import explain_difference
from opsmith.checking.properties.numeric.differentiable import (
    differentiated_names,
    frozen_parameters,
    not_exercised,
)
from opsmith.checking.properties.numeric.gradient_truth import Backward
from opsmith.checking.properties.numeric.linearity import not_linear
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure, Given
from opsmith.checking.run import Run, cases, each_run
from opsmith.checking.samples.cases import ALWAYS_CHECKED, case_name
from opsmith.checking.samples.grad_outputs import plain_grad_outputs
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import of_own_apply, through_apply
from opsmith.judging.compare import form_difference
from opsmith.judging.judge import judge
from opsmith.judging.tensors import CPU

NAME = "surrogate"


def run(subject: Subject) -> Findings:
    """Check form, linearity and stand-in of the surrogate gradients on every sample."""
    if not subject.specification.gradients.surrogate:
        yield Skipped("the operator has no surrogate gradients")
        return
    found = [*each_run(NAME, _check, subject)]
    found += not_exercised(NAME, subject, "surrogate gradient")
    found += frozen_parameters(NAME, subject)
    failed = any(isinstance(finding, Failure) for finding in found)
    own = through_apply(subject)
    if own is not None and not failed:
        own = replace(own, samples=tuple(sample for sample in own.samples if not sample.origin))
        formed = [each for each in each_run(NAME, _forms, own) if isinstance(each, Failure)]
        found += [of_own_apply(each, subject) for each in formed]
    yield from found
    if not failed and not differentiated_names(subject):
        yield Skipped("no sample has a differentiable input: add a sample with floating tensors")


def _check(run: Run) -> Findings:
    yield from _forms(run)
    for argnum in run.argnums:
        yield from _precision(run, argnum)
        if run.subject.linear:
            fault = not_linear(run, argnum)
            if isinstance(fault, tuple):
                cause, words, evidence = fault
                yield _failure(run, argnum, cause, f"it {words}", evidence)
        else:
            yield Note("linearity in grad_output was left out: the operator is declared not to be linear")
    if run.argnums and run.subject.specification.gradients.stand_in is not None:
        yield from _stand_in(run)


def _forms(run: Run) -> Findings:
    """Check the form of each gradient alone, as torch's engine does."""
    places = [(dtype, device) for dtype in ALWAYS_CHECKED for device in run.subject.devices_with(dtype)]
    for argnum in run.argnums:
        for dtype, device in places:
            got = _gradient(run, argnum, dtype, device)
            if got is None:
                yield _failure(run, argnum, "missing-gradient", "it is None", {})
                break
            form = form_difference(got, run.sample.at(dtype, device)[argnum])
            if form is not None:
                what = (
                    f"it has the {form.aspect} {form.got}, but the input has the {form.aspect} "
                    f"{form.expected}"
                )
                cause = form.aspect if form.aspect in CAUSES else UNKNOWN
                yield _failure(run, argnum, cause, what, form.evidence())
                break


def _gradient(run: Run, argnum: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    values = plain_grad_outputs(run.subject, run.sample).beside(run.sample)(dtype, device)
    return Backward(run.alone(argnum)).or_none(values)[0]


def _precision(run: Run, argnum: int) -> Findings:
    """Check that float64 stays float64: the gradient is not computed in float32."""
    values = plain_grad_outputs(run.subject, run.sample).beside(run.sample)(torch.float64, CPU)
    measured = Backward(run.alone(argnum)).computation(values, computed_in=None)
    if not run.subject.single_precision and measured.precision == torch.float32:
        what = "in float64, it has only the digits of float32: a part of it is computed in float32"
        evidence = {"sample": case_name(run.sample, torch.float64, CPU)}
        yield _failure(run, argnum, "precision", what, evidence)


def _stand_in(run: Run) -> Findings:
    """Compare gradients with autograd's through the stand-in."""
    subject = run.subject
    function = subject.plain(run.sample, subject.specification.gradients.stand_in)
    arguments = plain_grad_outputs(subject, run.sample).beside(run.sample)
    gradients = Backward(run, function).computation(
        arguments(torch.float64, CPU), has_truth=not subject.specification.random, computed_in=None
    )
    for case in cases(run, gradients, ALWAYS_CHECKED, arguments):
        if isinstance(case, Note):
            yield case
            continue
        for argnum, right in zip(run.argnums, case.answers, strict=True):
            got = _gradient(run, argnum, case.dtype, case.device)
            verdict = None if got is None else judge(got, right)
            if got is not None and verdict is not None and verdict.difference is not None:
                looks, reason = explain_difference(got.cpu(), right.tensor)
                what = f"it is not the gradient of the stand-in: {verdict}" + (
                    f"; {reason}" if reason else ""
                )
                yield _failure(run, argnum, looks, what, verdict.difference.evidence())


def _failure(run: Run, argnum: int, cause: str, what: str, evidence: dict[str, Any]) -> Failure:
    message = f"the surrogate gradient of `{run.sample.labels[argnum]}` is wrong: {what}"
    unpromised = cause in ("nonlinear-grad", "ignores-grad-output", "missing-gradient")
    given: Given = "unpromised" if unpromised else "usual"
    return run.failure(argnum, cause, message, evidence=evidence, given=given)


SURROGATE = Property(NAME, "surrogate gradients are linear in grad_output, and fit their stand-in", run)
