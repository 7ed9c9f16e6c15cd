"""Samples in float32, for what takes float32 and not float64: one finding, and not one of each property."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from opsmith.checking.exceptions import attribute_exception, refuse_own, stated, watched_calls
from opsmith.checking.numerics.autodiff import has_gradient
from opsmith.checking.processes.fork import run_isolated
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.property import REFUSED, first_line, raised
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.samples.cases import dtype_name
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.kernels.triton.interpreted_launches import interprets_launches, launched_kernels


def in_single_precision(subject: Subject, limit_s: float) -> Subject:
    """Return the subject with samples in float32, if it takes these, as its author's are, and not float64.

    A forward that takes float64 and a backward that fails there, without a word of its own, stay as they are.
    Where something asks for float64, such as finite differences, numbers are cast, and all that holds for a
    function that computes in float32 holds for it. What launches kernels in Triton is narrowed whatever its
    samples are, and also where it returns float32: GPU kernels seldom take float64.

    Args:
        subject: The subject of the check.
        limit_s: Seconds that its calls may take in a child process; 0 for none.
    """
    if subject.kind.has_reference or not subject.samples or not subject.samples[0].inexact:
        return subject
    if not interprets_launches() and not _is_single(subject.samples[0]):
        return subject
    where = subject.specification.where
    tried = (
        run_isolated(FORWARD, partial(_tried, subject), where=where, limit_s=limit_s)
        if limit_s
        else _tried(subject)
    )
    if not tried.reason:
        return subject
    narrowed = tuple(replace(each, flat=tuple(each.at(torch.float32))) for each in subject.samples)
    return replace(subject, samples=narrowed, narrow=tried.reason, refused_float64=tried.failures)


FORWARD = "forward"


def _is_single(sample: Sample) -> bool:
    """True if the floating arguments of a sample are in float32, as its author gave them."""
    given = [sample.flat[argnum] for argnum in sample.inexact]
    return all(each.dtype in (torch.float32, torch.complex64) for each in given)


def _tried(subject: Subject) -> Outcome:
    """Return what it raises in float64, as the reason, if it takes float32; and the failure for that."""
    refusal: BaseException | str | None = None
    # A property reports a call that does not return.
    with without_warnings(), suppress(EndlessCallError), watched_calls():
        refusal = _refusal(subject, torch.float64)
        if refusal is not None and _refusal(subject, torch.float32) is not None:
            refusal = None
    launches = bool(launched_kernels())
    if refusal is None or not (launches or _is_single(subject.samples[0])):
        return Outcome(FORWARD, "passed")
    if isinstance(refusal, str):
        return Outcome(FORWARD, "passed", refusal)
    reason = f"{type(refusal).__name__}: {first_line(refusal)}"
    return Outcome(FORWARD, "passed", reason, failures=() if launches else (_failure(subject, refusal),))


def _failure(subject: Subject, error: BaseException) -> Failure:
    """The failure for what is raised in float64 alone: a limit if that is said on purpose."""
    found = raised(FORWARD, subject, error, f"{subject.samples[0]} in float64")
    said = isinstance(error, Exception) and attribute_exception(
        error, lambda: _refusal(subject, torch.float64)
    )
    words = "" if said else ". Make tensors in the dtype of its arguments"
    return replace(
        found,
        message=f"it takes float32 and not float64: {found.message}{words}",
        dtypes=("float64",),
        evidence={**found.evidence, **({REFUSED: "by an error of its own"} if said else {})},
    )


def precision_remarks(subject: Subject) -> tuple[str, ...]:
    """Return the remarks for a report on kernels in Triton, and on samples that were narrowed."""
    kernels = ", ".join(f"`{name}`" for name in launched_kernels())
    found = []
    if kernels:
        found.append(f"kernels in Triton ran in Triton's interpreter on the CPU, not on a GPU: {kernels}")
    if subject.narrow and (kernels or subject.refused_float64):
        found.append(f"it takes float32 and not float64 ({subject.narrow}), and was checked in float32")
    return tuple(found)


def _refusal(subject: Subject, dtype: torch.dtype) -> BaseException | str | None:
    """Return what a call on the first sample and its backward raise in a dtype; None if they run in it."""
    sample, forward = subject.samples[0], True
    try:
        with torch.enable_grad():
            flat = sample.at(dtype)
            for argnum in sample.inexact:
                flat[argnum].requires_grad_()
            leaves = [value for value in flat if has_gradient(value)]
            every = [each for each in subject.call(sample, flat) if is_inexact(each)]
            forward = False
            narrower = [each for each in every if torch.finfo(each.dtype).bits < torch.finfo(dtype).bits]
            if narrower and launched_kernels():
                return f"a result is {dtype_name(narrower[0].dtype)} then"
            results = [each for each in every if has_gradient(each)]
            ones = [torch.ones_like(each) for each in results]
            torch.autograd.grad(results, leaves, ones, allow_unused=True)
    except BaseException as error:
        refuse_own(error)
        meant = forward or bool(launched_kernels()) or stated(error) or dtype == torch.float32
        return error if meant else None
    return None
