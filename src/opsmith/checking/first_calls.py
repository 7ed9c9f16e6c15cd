"""First calls: each sample, and each input derived from one, is called once before any property runs on it.

A call that cannot run, or that cannot run in float64, is therefore reported once, not by every property.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.build.toolchain import processors
from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import attribute_exception, error_words, refuse_own, stated, watched_calls
from opsmith.checking.numerics.autodiff import differentiate_by_ones, record
from opsmith.checking.processes.fork import run_isolated
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.properties.kernels.sizes import DeadlySizes, deadly_sizes, kernel_sizes
from opsmith.checking.property import REFUSED, Property, endless, missing_here, raised
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.run import each_run
from opsmith.checking.run_property import few_threads, in_child_process, merged, run
from opsmith.checking.samples.cases import dtype_name
from opsmith.checking.samples.domain import symmetric_labels
from opsmith.checking.samples.sample import Sample, shown_sample
from opsmith.checking.samples.variations import Variations, variations
from opsmith.checking.side_effects.canaries import read_outside
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import ForwardRaisedError, GivenSamples, subject_of
from opsmith.core.kernels import BuiltKernel
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.judging.tensors import CPU, is_inexact
from opsmith.kernels.launches_on_cpu import launched_kernels, runs_launches

PROPERTY = "forward"
"""Property that reports the exceptions of calls."""


def unrunnable(operator: Any, samples: GivenSamples, seed: int, level: Effort, limit_s: float) -> Outcome:
    """Try in a child process to find a subject's types: this runs a class, which may end the process."""

    def begin() -> Outcome:
        try:
            subject_of(operator, samples, seed, level)
        except ForwardRaisedError as raised_:
            return raised_.outcome
        return Outcome(PROPERTY, "passed")

    return run_isolated(PROPERTY, begin, where=declared_at(operator), limit_s=limit_s)


def declared_at(operator: Any) -> str:
    """Return `file:line` of the reference of an operator, or of the forward of a class; else a name."""
    if isinstance(operator, Operator):
        return operator.specification.where
    return where(getattr(operator, "forward", None) or operator)


def in_single_precision(subject: Subject, limit_s: float) -> Subject:
    """Return the subject with float32 samples, if its author's are in float32 and it does not take float64.

    Samples stay in float64 if the forward takes it and the backward fails without an error of its own. Where
    float64 is needed, as for finite differences, numbers are cast, and the subject is judged like a function
    that computes in float32. A subject that launches kernels in Triton is narrowed for all samples, and also
    if it returns float32, since GPU kernels seldom take float64.

    Args:
        limit_s: Seconds that its calls may take in a child process; 0 for none.
    """
    if subject.kind.has_reference or not subject.samples or not subject.samples[0].inexact:
        return subject
    if not runs_launches() and not _is_single(subject.samples[0]):
        return subject
    tried = in_child_process(PROPERTY, subject, limit_s, partial(_tried, subject))
    if not tried.reason:
        return subject
    narrowed = tuple(each.cast(torch.float32) for each in subject.samples)
    return replace(subject, samples=narrowed, narrow=tried.reason, refused_float64=tried.failures)


def _is_single(sample: Sample) -> bool:
    """True if the floating arguments of a sample, as its author gave them, are in float32."""
    given = [sample.flat[argnum] for argnum in sample.inexact]
    return all(each.dtype in (torch.float32, torch.complex64) for each in given)


def _tried(subject: Subject) -> Outcome:
    """Return the error that it raises in float64 only, as the reason, and the failure for this error."""
    refusal: BaseException | str | None = None
    # A property reports a call that does not return.
    with suppress(EndlessCallError), watched_calls():
        for sample in (each for each in subject.samples if each.inexact):
            refusal = _refusal(subject, sample, torch.float64)
            if refusal is not None and _refusal(subject, sample, torch.float32) is None:
                break
            refusal = None
    launches = bool(launched_kernels())
    if refusal is None or not (launches or _is_single(subject.samples[0])):
        return Outcome(PROPERTY, "passed")
    if isinstance(refusal, str):
        return Outcome(PROPERTY, "passed", refusal)
    failures = () if launches else (_failure(subject, sample, refusal),)
    return Outcome(PROPERTY, "passed", error_words(refusal), failures=failures)


def _failure(subject: Subject, sample: Sample, error: BaseException) -> Failure:
    """The failure for an error in float64 only; no error if no sample is in float64, or if it is meant."""
    found = raised(PROPERTY, subject, error, f"{sample} in float64")
    said = isinstance(error, Exception) and attribute_exception(
        error, lambda: _refusal(subject, sample, torch.float64)
    )
    words = "" if said else ". Create tensors in the dtype of the arguments"
    return replace(
        found,
        message=f"the operator takes float32, but not float64: {found.message}{words}",
        dtypes=("float64",),
        evidence={**found.evidence, **({REFUSED: "by an error of its own"} if said else {})},
        given="undeclared" if all(map(_is_single, subject.samples)) else "usual",
    )


def _refusal(subject: Subject, sample: Sample, dtype: torch.dtype) -> BaseException | str | None:
    """Return the error that a call on a sample, or its backward, raises in a dtype; None if both run."""
    forward = True
    try:
        leaves, _, results = record(partial(subject.call, sample), sample.at(dtype), sample.inexact)
        forward, bits = False, torch.finfo(dtype).bits
        dtypes = [each.dtype for each in results if is_inexact(each)]
        narrower = [each for each in dtypes if torch.finfo(each).bits < bits]
        if narrower and launched_kernels():
            return f"a result is still {dtype_name(narrower[0])}"
        if not subject.lacks("gradient"):
            differentiate_by_ones(results, [leaves[argnum] for argnum in sample.inexact])
    except BaseException as error:
        refuse_own(error)
        meant = forward or bool(launched_kernels()) or stated(error) or dtype == torch.float32
        return error if meant else None
    return None


def compile_kernels(subject: Subject) -> None:
    """Compile all kernels for the CPU at once, since derived inputs are tried on all of them."""
    kernels = [each.given for each in subject.kernels_on(CPU) if isinstance(each.given, BuiltKernel)]
    if len(kernels) > 1:
        with ThreadPoolExecutor(processors()) as threads:
            # A new thread has no context: it gets the check's context, which has the built kernels to use.
            done = [
                threads.submit(copy_context().run, kernel.compile_ahead) for kernel in dict.fromkeys(kernels)
            ]
        for each in done:
            with suppress(errors.LanguageError):  # reported by a call that needs it
                each.result()


def runnable_samples(subject: Subject, limit_s: float) -> tuple[Subject, tuple[Failure, ...]]:
    """The subject with the samples on which calls succeed, and the failures for the other samples.

    Every property would raise the same error on the other samples.

    Args:
        limit_s: Seconds that all calls may take in a child process; 0 for none.
    """
    failures: list[Failure] = []
    while subject.samples:
        found = in_child_process(PROPERTY, subject, limit_s, partial(_first_calls, subject)).failures
        failures += found
        subject, left = _without(subject, found), len(subject.samples)
        # After a process dies, go on with the next sample; after a hang do not, as each would cost the limit.
        if not any("signal" in each.evidence or "status" in each.evidence for each in found):
            break
        if len(subject.samples) == left:  # it died before any call
            subject = replace(subject, samples=())
    return subject, merged(failures)


def _first_calls(subject: Subject) -> Outcome:
    """Call the reference and the operator on each sample; one failure for each that raises."""
    found: list[Failure] = []
    watchdog = watched_calls()
    try:
        with few_threads(subject.effort), torch.no_grad(), watchdog:
            for sample in subject.samples:
                try:
                    if subject.kind.has_reference:
                        subject.reference(sample, sample.at())
                    subject.call(sample, sample.at())
                except BaseException as error:
                    refuse_own(error)
                    found.append(raised(PROPERTY, subject, error, str(sample)))
    except EndlessCallError as error:  # later samples may hang as well; the properties try them
        found.append(endless(PROPERTY, subject.specification.where, error, watchdog))
    return Outcome(PROPERTY, "passed", failures=tuple(found))


def _without(subject: Subject, failures: tuple[Failure, ...]) -> Subject:
    """The subject without the samples that failures name."""
    named = (shown_sample(each, subject.samples) for each in failures)
    dropped = {sample.position for sample in named if sample is not None}
    left = tuple(sample for sample in subject.samples if sample.position not in dropped)
    return replace(subject, samples=left, dropped=subject.dropped | dropped)


OUTSIDE = "out-of-bounds"

READS = Property(PROPERTY, "", partial(each_run, PROPERTY, read_outside, devices=True))
"""Calls whose tensors have margins around them; their failures count as failures of `forward`."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a check: the samples and derived inputs on which calls succeed, and failures for the rest.

    Args:
        subject: The subject, with the samples that run.
        refused: Failures for the author's samples that do not run.
        derived: Inputs derived from the samples.
        symmetric: Labels of the symmetric inputs of which only one triangle is read.
        deaths: Failures for the death of the process that derives inputs.
        deadly: Sizes of 0 with which a kernel ends the process.
    """

    subject: Subject
    refused: tuple[Failure, ...] = ()
    derived: Variations = field(default_factory=Variations)
    symmetric: frozenset[str] = frozenset()
    deaths: tuple[Failure, ...] = ()
    deadly: DeadlySizes = field(default_factory=partial(DeadlySizes, ()))

    @property
    def whole(self) -> Subject:
        """The subject with all inputs."""
        return replace(self.subject, samples=(*self.subject.samples, *self.derived.samples))

    @property
    def read_outside(self) -> bool:
        """True if a call depends on memory outside of its arguments, so that no two runs can be compared."""
        return any(each.cause == OUTSIDE for each in self.refused)

    def of(self, known: Property) -> Subject:
        """The subject with the inputs that a property runs on."""
        subject = self.whole if known.inputs == "every" else self.subject
        if known.inputs == "few":
            subject = sample_subset(subject)
        symmetric = self.symmetric and "differences" in known.traits
        return replace(subject, symmetric=self.symmetric) if symmetric else subject

    def remarks(self, few: Iterable[str]) -> Iterator[str]:
        """Yield remarks for the report on the inputs that were checked.

        Args:
            few: Names of the properties that ran on a subset of the samples.
        """
        names = ", ".join(f"`{name}`" for name in few)
        looked_at, every = len(sample_subset(self.subject).samples), len(self.subject.samples)
        if looked_at < every and names:
            yield f"{names} used {looked_at} of the {every} samples: the effort is `quick`"
        if self.symmetric:
            names = ", ".join(f"`{label}`" for label in sorted(self.symmetric))
            yield (
                f"derivatives with respect to {names} are taken along symmetric matrices: every "
                "sample has a symmetric matrix there, and the operator reads only one triangle"
            )

    def precision_remarks(self) -> Iterator[str]:
        """Yield remarks for the report on launches that ran on the CPU, and on samples cast to float32."""
        launched, subject = launched_kernels(), self.subject
        for words, names in launched.items():
            yield f"{words}: {', '.join(f'`{name}`' for name in names)}"
        if subject.narrow and (launched or subject.refused_float64):
            yield (
                f"the operator takes float32, but not float64 ({subject.narrow}), so it was checked in "
                "float32"
            )

    def reported(self, outcome: Outcome) -> Outcome:
        """The outcome of the property `forward`, with the failures found before any property ran."""
        if self.refused:  # also if `forward` was not requested: no property runs on these samples
            failures = merged((*self.refused, *outcome.failures))
            # Properties that did not run refer to this outcome, so its own reason must name what is missing.
            reason = outcome.reason and (missing_here(failures) or "the operator could not run at all")
            outcome = replace(outcome, status="failed", reason=reason, failures=failures, left_out=False)
        more = [*self.derived.unserved]
        if not any(each.cause == "raises" for each in outcome.failures):
            more += self.deaths
        more += merged(self.deadly.deaths)
        if self.deadly.note:
            outcome = replace(outcome, notes=(*outcome.notes, self.deadly.note))
        if more and not outcome.left_out:
            outcome = replace(outcome, status="failed", failures=(*outcome.failures, *more))
        return outcome


def sample_subset(subject: Subject) -> Subject:
    """The subject with the samples that differ most from each other, if the effort limits their number.

    First come samples that differ in which arguments are tensors, in numbers of dimensions, or in having no
    elements; then the remaining samples in order.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> len(sample_subset(subject_of(opsmith.ops.linear, None, 0, EFFORTS["quick"])).samples)
        4
    """
    if len(subject.samples) <= subject.effort.subset:
        return subject
    kinds: dict[tuple[Any, ...], int] = {}
    for sample in subject.samples:
        kinds.setdefault(_kind(sample), sample.position)
    first = {*kinds.values()}
    ordered = sorted(subject.samples, key=lambda sample: sample.position not in first)
    chosen = ordered[: subject.effort.subset]
    return replace(subject, samples=tuple(sorted(chosen, key=lambda sample: sample.position)))


def _kind(sample: Sample) -> tuple[Any, ...]:
    """Key that distinguishes samples: their tensors, ranks and dtypes, and those that are empty."""
    return tuple(
        (value.dim(), value.dtype, bool(value.numel())) if isinstance(value, Tensor) else type(value)
        for value in sample.flat
    )


def tried_inputs(subject: Subject, refused: tuple[Failure, ...], limit_s: float) -> Inputs:
    """Derive inputs from the samples that run, and leave out inputs that end the process.

    Args:
        subject: The subject, with the samples that run.
        refused: Failures for the author's samples that do not run.
        limit_s: Seconds that it may take in a child process; 0 for none.
    """
    safe = subject.by_reference() if limit_s else subject
    with few_threads(subject.effort):
        derived, deaths = _derived(safe, limit_s)
        symmetric = frozenset() if deaths else symmetric_labels(safe)
        deadly = deadly_sizes(PROPERTY, subject, derived.samples)
    inputs = Inputs(subject, refused, replace(derived, samples=deadly.survived), symmetric, deaths, deadly)
    return replace(inputs, refused=(*refused, *_read_outside(inputs.whole, limit_s)))


def _read_outside(subject: Subject, limit_s: float) -> tuple[Failure, ...]:
    """The failures of calls that depend on memory outside of their arguments."""
    if not (subject.specification.kernels or subject.kind.in_library):  # torch checks its own bounds
        return ()
    sizes = kernel_sizes(subject.by_reference() if limit_s else subject)
    more = replace(subject, samples=(*subject.samples, *sizes))
    found = run(READS, more, limit_s).failures
    return tuple(each for each in found if each.cause == OUTSIDE)  # the properties report its exceptions


def _derived(subject: Subject, limit_s: float) -> tuple[Variations, tuple[Failure, ...]]:
    """Derive inputs; if this ends the child process that tries it first, return only the failures."""

    def begin() -> Outcome:
        return Outcome(PROPERTY, "passed", failures=_derived(subject, 0.0)[1])

    deaths = in_child_process(PROPERTY, subject, limit_s, begin).failures if limit_s else ()
    if deaths:
        return Variations(), deaths
    watchdog = watched_calls()
    try:
        # Otherwise torch accepts an index out of range in a sparse tensor, which damages the process.
        with watchdog, torch.sparse.check_sparse_tensor_invariants():
            return variations(subject), ()
    except EndlessCallError as error:
        return Variations(), (endless(PROPERTY, subject.specification.where, error, watchdog),)
    except SystemExit as error:
        return Variations(), (raised(PROPERTY, subject, error, "an input derived from the samples"),)
