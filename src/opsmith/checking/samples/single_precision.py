"""Samples in float32, for what launches kernels in Triton and does not take float64."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from opsmith.checking.exceptions import refuse_own, watched_calls
from opsmith.checking.numerics.autodiff import has_gradient
from opsmith.checking.processes.fork import run_isolated
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.property import first_line
from opsmith.checking.report import Outcome
from opsmith.checking.samples.cases import dtype_name
from opsmith.checking.samples.sample import is_inexact
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.kernels.triton.interpreted_launches import interprets_launches, launched_kernels


def in_single_precision(subject: Subject, limit_s: float) -> Subject:
    """Return the subject with samples in float32, if it is a kernel in Triton that does not take float64.

    GPU kernels seldom do. Where something asks for float64, such as finite differences, numbers are cast, and
    all that holds for a function that computes in float32 holds for it.

    Args:
        subject: The subject of the check.
        limit_s: Seconds that its calls may take in a child process; 0 for none.
    """
    if subject.kind.has_reference or not interprets_launches():
        return subject
    where = subject.specification.where
    tried = (
        run_isolated("forward", partial(_tried, subject), where=where, limit_s=limit_s)
        if limit_s
        else _tried(subject)
    )
    if not tried.reason:
        return subject
    narrowed = tuple(replace(each, flat=tuple(each.at(torch.float32))) for each in subject.samples)
    return replace(subject, samples=narrowed, narrow=tried.reason)


def _tried(subject: Subject) -> Outcome:
    """Return what it raises in float64, as the reason, if it launches kernels in Triton and takes float32."""
    refusal: str | None = ""
    # A property reports a call that does not return.
    with without_warnings(), suppress(EndlessCallError), watched_calls():
        refusal = _refusal(subject, torch.float64)
        if refusal is None or _refusal(subject, torch.float32) is not None or not launched_kernels():
            refusal = ""
    return Outcome("forward", "passed", refusal or "")


def triton_remarks(subject: Subject) -> tuple[str, ...]:
    """Return the remarks for a report on what launches kernels in Triton."""
    kernels = ", ".join(f"`{name}`" for name in launched_kernels())
    if not kernels:
        return ()
    found = [f"kernels in Triton ran in Triton's interpreter on the CPU, not on a GPU: {kernels}"]
    if subject.narrow:
        found.append(f"it takes float32 and not float64 ({subject.narrow}), and was checked in float32")
    return tuple(found)


def _refusal(subject: Subject, dtype: torch.dtype) -> str | None:
    """Return what a call on the first sample and its backward raise in a dtype; None if they run in it."""
    sample = subject.samples[0]
    try:
        with torch.enable_grad():
            flat = sample.at(dtype)
            for argnum in sample.inexact:
                flat[argnum].requires_grad_()
            leaves = [value for value in flat if has_gradient(value)]
            every = [each for each in subject.call(sample, flat) if is_inexact(each)]
            narrower = [each for each in every if torch.finfo(each.dtype).bits < torch.finfo(dtype).bits]
            if narrower:
                return f"a result is {dtype_name(narrower[0].dtype)} then"
            results = [each for each in every if has_gradient(each)]
            ones = [torch.ones_like(each) for each in results]
            torch.autograd.grad(results, leaves, ones, allow_unused=True)
    except BaseException as error:
        refuse_own(error)
        return f"{type(error).__name__}: {first_line(error)}"
    return None
