"""First calls: each sample, and each input derived from one, is called once before any property runs on it.

What cannot run is reported once, and not by every property in the same words.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from opsmith.build.toolchain import processors
from opsmith.checking.class_runs import ForwardRaisedError
from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import refuse_own, watched_calls
from opsmith.checking.processes.fork import run_isolated
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.properties.kernels.sizes import DeadlySizes, deadly_sizes, kernel_sizes
from opsmith.checking.property import Property, each_sample, endless, missing_here, raised
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.run_property import few_threads, in_child_process, merged, run
from opsmith.checking.samples.given import GivenSamples
from opsmith.checking.samples.sample import CPU, Sample
from opsmith.checking.samples.selection import sample_subset
from opsmith.checking.samples.symmetric import among_symmetric
from opsmith.checking.samples.variations import Variations, failure_of, variations
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.side_effects.margins import read_outside
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import subject_of
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.kernels.cpp.kernel import CppKernel

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


def compile_kernels(subject: Subject) -> None:
    """Compile the kernels in C++ for the CPU at once, as derived inputs are tried on all of them.

    Args:
        subject: The subject of the check.
    """
    kernels = [each.given for each in subject.kernels_on(CPU) if isinstance(each.given, CppKernel)]
    if len(kernels) > 1:
        with ThreadPoolExecutor(processors()) as threads:
            # A thread has no context of its own: that of the check says which built kernels are used.
            done = [
                threads.submit(copy_context().run, kernel.compile_ahead) for kernel in dict.fromkeys(kernels)
            ]
        for each in done:
            each.result()


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

    return in_child_process(PROPERTY, subject, limit_s, begin).failures


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


OUTSIDE = "out-of-bounds"

READS = Property(PROPERTY, "", partial(each_sample, PROPERTY, partial(read_outside, PROPERTY)))
"""Calls between margins, whose failures are those of results."""

NO_VARIATIONS = Variations((), ())


@dataclass(frozen=True)
class Inputs:
    """Inputs of a check: the samples and derived inputs that calls take, and failures for the others.

    Args:
        subject: The subject, with the samples that run.
        refused: Failures for the author's samples that do not run.
        derived: Inputs derived from the samples.
        symmetric: The subject, with its symmetric inputs marked.
        deaths: Failures for the end of the process that derives inputs.
        deadly: Sizes of 0 that end the process in a kernel.
    """

    subject: Subject
    refused: tuple[Failure, ...]
    derived: Variations
    symmetric: Subject
    deaths: tuple[Failure, ...]
    deadly: DeadlySizes

    @property
    def every(self) -> Subject:
        """The subject with all inputs."""
        return replace(self.subject, samples=(*self.subject.samples, *self.derived.samples))

    @property
    def read_outside(self) -> bool:
        """True if a call depends on memory outside of what it is given: no two runs can be compared."""
        return any(each.cause == OUTSIDE for each in self.refused)

    def of(self, known: Property) -> Subject:
        """The subject with the inputs that a property runs on."""
        subject = self.every if known.varied else self.subject
        if known.subset and not known.varied:
            subject = sample_subset(subject)
        if known.differences and self.symmetric.symmetric:
            subject = replace(subject, symmetric=self.symmetric.symmetric)
        return subject

    def reported(self, outcome: Outcome) -> Outcome:
        """The outcome of results, with what was found before any property ran."""
        if self.refused:  # also where results were not asked for: no property runs on these samples
            failures = merged((*self.refused, *outcome.failures))
            # Properties that did not run refer to this outcome, so its own reason must name what is missing.
            reason = outcome.reason and (missing_here(failures) or "it could not be run at all")
            outcome = replace(outcome, status="failed", reason=reason, failures=failures, left_out=False)
        more = [failure_of(PROPERTY, self.subject, each) for each in self.derived.unserved]
        if not any(each.cause == "raises" for each in outcome.failures):
            more += self.deaths
        more += merged(self.deadly.deaths)
        if self.deadly.note:
            outcome = replace(outcome, notes=(*outcome.notes, self.deadly.note))
        if more and not outcome.left_out:
            outcome = replace(outcome, status="failed", failures=(*outcome.failures, *more))
        return outcome


def without_calls(subject: Subject, refused: tuple[Failure, ...] = ()) -> Inputs:
    """The inputs of a check in which nothing is called.

    Args:
        subject: The subject of the check.
        refused: Failures for the author's samples.
    """
    return Inputs(subject, refused, NO_VARIATIONS, subject, (), DeadlySizes(()))


def tried_inputs(subject: Subject, refused: tuple[Failure, ...], limit_s: float) -> Inputs:
    """Derive inputs from the samples that run, and leave out those that end the process.

    Args:
        subject: The subject, with the samples that run.
        refused: Failures for the author's samples that do not run.
        limit_s: Seconds that it may take in a child process; 0 for none.
    """
    safe = subject.by_reference() if limit_s else subject
    with few_threads(subject.effort):
        derived, deaths = _derived(safe, limit_s)
        symmetric = safe if deaths else among_symmetric(safe)
        deadly = deadly_sizes(PROPERTY, subject, derived.samples)
    inputs = Inputs(subject, refused, replace(derived, samples=deadly.survived), symmetric, deaths, deadly)
    return replace(inputs, refused=(*refused, *_read_outside(inputs.every, limit_s)))


def _read_outside(subject: Subject, limit_s: float) -> tuple[Failure, ...]:
    """The failures of calls that depend on memory outside of what they are given."""
    if not (subject.specification.kernels or subject.kind.in_library):  # torch holds its own code to bounds
        return ()
    sizes = kernel_sizes(subject.by_reference() if limit_s else subject)
    more = replace(subject, samples=(*subject.samples, *sizes))
    found = run(READS, more, limit_s).failures
    return tuple(each for each in found if each.cause == OUTSIDE)  # the properties report what it raises


def _derived(subject: Subject, limit_s: float) -> tuple[Variations, tuple[Failure, ...]]:
    """Derive inputs; none where this ends the child process that tries it first, with the failures."""
    if limit_s:

        def begin() -> Outcome:
            return Outcome(PROPERTY, "passed", failures=_derived(subject, 0.0)[1])

        deaths = in_child_process(PROPERTY, subject, limit_s, begin).failures
        if deaths:
            return NO_VARIATIONS, deaths
    watchdog = watched_calls()
    try:
        with watchdog:
            return variations(subject), ()
    except EndlessCallError as error:
        return NO_VARIATIONS, (endless(PROPERTY, subject.specification.where, error, watchdog),)
    except SystemExit as error:
        return NO_VARIATIONS, (raised(PROPERTY, subject, error, "an input derived from the samples"),)
