"""First calls: each of the author's samples is called once, so that what cannot run is reported once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import refuse_own, watched_calls
from opsmith.checking.processes.fork import run_isolated
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.properties.kernels.sizes import kernels_in_cpp
from opsmith.checking.property import endless, raised
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.run_property import few_threads, merged
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import ForwardRaisedError, GivenSamples, subject_of
from opsmith.core.location import where
from opsmith.core.operator import Operator

PROPERTY = "forward"
"""Property that reports what a call raises."""


def unrunnable(operator: Any, samples: GivenSamples, seed: int, level: Effort, limit_s: float) -> Outcome:
    """Try in a child process to find a subject's types: a class is run for this, and may end the process.

    Args:
        operator: As of `check`.
        samples: As of `check`.
        seed: As of `check`.
        level: Level of effort.
        limit_s: Seconds that it may take.
    """

    def begin() -> Outcome:
        try:
            subject_of(operator, samples, seed, level)
        except ForwardRaisedError as raised_:
            return raised_.outcome
        return Outcome(PROPERTY, "passed")

    forward = getattr(operator, "forward", None)
    location = operator.specification.where if isinstance(operator, Operator) else where(forward or operator)
    return run_isolated(PROPERTY, begin, where=location, limit_s=limit_s)


def runnable_samples(subject: Subject, limit_s: float) -> tuple[Subject, tuple[Failure, ...]]:
    """The subject with the samples that a call takes, and the failures for the others.

    Every property would raise on these, in the same words.

    Args:
        subject: The subject of the check.
        limit_s: Seconds that all calls may take in a child process; 0 for none.
    """
    failures: list[Failure] = []
    while subject.samples:
        found = _isolated(subject, limit_s) if limit_s else _first_calls(subject)
        failures += found
        subject, left = _without(subject, found), len(subject.samples)
        # A process that dies tries no further sample; one that hangs would cost its limit for each.
        if not any("signal" in each.evidence or "status" in each.evidence for each in found):
            break
        if len(subject.samples) == left:  # it died before any call
            subject = replace(subject, samples=())
    return subject, merged(failures)


def _isolated(subject: Subject, limit_s: float) -> tuple[Failure, ...]:
    def begin() -> Outcome:
        return Outcome(PROPERTY, "passed", failures=_first_calls(subject))

    location, kernels = subject.specification.where, kernels_in_cpp(subject.specification)
    return run_isolated(PROPERTY, begin, where=location, limit_s=limit_s, kernels=kernels).failures


def _first_calls(subject: Subject) -> tuple[Failure, ...]:
    """Call the reference and the operator on each sample; one failure for each that raises."""
    found: list[Failure] = []
    watchdog = watched_calls()
    try:
        with without_warnings(), few_threads(subject.effort), torch.no_grad(), watchdog:
            for sample in subject.samples:
                try:
                    if subject.kind.has_reference:
                        subject.reference(sample, sample.at())
                    subject.call(sample, sample.at())
                except BaseException as error:
                    refuse_own(error)
                    found.append(raised(PROPERTY, subject, error, str(sample)))
    except EndlessCallError as error:  # the samples after it may hang as well, and are left to the properties
        found.append(endless(PROPERTY, subject.specification.where, error, watchdog))
    return tuple(found)


def _without(subject: Subject, failures: tuple[Failure, ...]) -> Subject:
    """The subject without the samples that failures name."""
    named = [str(each.evidence.get("sample", "")) for each in failures]

    def runs(sample: Sample) -> bool:
        return not any(name.startswith(str(sample)) for name in named)

    left = tuple(sample for sample in subject.samples if runs(sample))
    dropped = {sample.position for sample in subject.samples if not runs(sample)}
    return replace(subject, samples=left, dropped=subject.dropped | dropped)
