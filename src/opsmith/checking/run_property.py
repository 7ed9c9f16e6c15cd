"""Run one property on its samples, in a child process where asked, and merge its findings into an outcome."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.causes import CAUSES, UNKNOWN, first_of
from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import Overlooking, refuse_own
from opsmith.checking.processes.fork import run_isolated
from opsmith.checking.properties.kernels.sizes import kernels_in_cpp
from opsmith.checking.property import Note, Property, Skipped, raised
from opsmith.checking.report import Failure, Outcome, Status, all_dtypes, with_dtypes
from opsmith.checking.samples.generate_like import is_symmetric
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import thread_count, without_warnings
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in


def run(known: Property, subject: Subject, limit_s: float) -> Outcome:
    """Run one property.

    Args:
        known: The property.
        subject: The subject of the check.
        limit_s: Seconds that it may take in a child process; 0 for none.
    """
    if not limit_s:
        return _outcome(known, subject)
    location = subject.specification.where
    kernels = kernels_in_cpp(subject.specification)
    found = run_isolated(
        known.name, lambda: _outcome(known, subject), where=location, limit_s=limit_s, kernels=kernels
    )
    return replace(found, compiles=known.compiles)


def few_threads(effort: Effort) -> AbstractContextManager[None]:
    """Return a region with one thread; a thorough check keeps all, since several may show a wrong kernel."""
    return thread_count(torch.get_num_threads() if effort.exhaustive else 1)


def _outcome(known: Property, subject: Subject) -> Outcome:
    """Run one property here, and sort its findings."""
    failures: list[Failure] = []
    notes: dict[str, None] = {}
    reasons: list[str] = []
    start = time.perf_counter()
    subject.ran.seen.clear()
    try:
        # An operator would repeat its warnings hundreds of times.
        with without_warnings(), few_threads(subject.effort):
            for finding in known.run(subject):
                if isinstance(finding, Failure):
                    failures.append(with_dtypes(finding))
                elif isinstance(finding, Note):
                    notes[finding.text] = None
                elif isinstance(finding, Skipped):
                    reasons.append(finding.reason)
    except BaseException as error:
        refuse_own(error)
        failures.append(raised(known.name, subject, error, "all samples"))
    seconds = time.perf_counter() - start
    status: Status = "failed" if failures else "skipped" if reasons else "passed"
    return Outcome(
        known.name,
        status,
        "; ".join(reasons),
        seconds,
        merged(failures, subject.samples),
        tuple(notes),
        compiles=known.compiles,
        dtypes=subject.ran.names(),
    )


FEW = 4
"""Fewest elements that decide between causes."""


def merged(failures: Sequence[Failure], samples: Sequence[Sample] = ()) -> tuple[Failure, ...]:
    """One failure for each thing that is wrong, however many samples, dtypes and layouts show it.

    Args:
        failures: Failures of one property.
        samples: Samples that it ran on.
    """
    groups: dict[tuple[Any, ...], list[Failure]] = {}
    for failure in failures:
        cause = "numeric" if CAUSES[failure.cause].numeric else failure.cause
        groups.setdefault((failure.property, failure.input, cause, failure.where), []).append(failure)
    return tuple(_of_nothing(_one(group), group, samples) for group in groups.values())


def _one(group: list[Failure]) -> Failure:
    causes = {failure.cause for failure in group}
    if len(causes) == 1:
        return _seen(group[0], group)
    supported = ({each.cause, *each.evidence.get("also fits", ())} for each in group)
    fitting = set.intersection(*supported) - {UNKNOWN}
    if fitting:
        cause = first_of(fitting)
        best = next((failure for failure in group if failure.cause == cause), group[0])
        return _seen(replace(best, cause=cause), group)
    decisive = [failure for failure in group if _elements(failure) >= FEW]
    if decisive and len({failure.cause for failure in decisive}) == 1:
        return _seen(decisive[0], group)
    evidence = {**group[0].evidence, "looks like": ", ".join(sorted(causes))}
    return _seen(replace(group[0], cause=UNKNOWN, evidence=evidence), group)


def _of_nothing(failure: Failure, group: Sequence[Failure], samples: Sequence[Sample]) -> Failure:
    """The failure, with the cause `empty` if it was seen on tensors without elements alone."""
    empty = {
        str(sample): not all(value.numel() for value in tensors_in(list(sample.flat))) for sample in samples
    }
    seen = [name for name in empty for each in group if str(each.evidence.get("sample", "")).startswith(name)]
    if len(seen) < len(group) or not all(empty[name] for name in seen) or all(empty.values()):
        return failure
    message = f"of tensors without elements alone: {failure.message}"
    return replace(failure, cause="empty", message=message)


def _elements(failure: Failure) -> int:
    """Number of elements of the wrong tensor; 0 where the evidence does not name it."""
    return int(str(failure.evidence.get("wrong elements", "0 of 0")).rpartition(" ")[2])


def _seen(failure: Failure, group: Sequence[Failure]) -> Failure:
    if len(group) == 1:
        return failure
    evidence = {**failure.evidence, "seen": f"in {len(group)} runs; one is shown"}
    return replace(failure, evidence=evidence, dtypes=all_dtypes(group))


def sample_subset(subject: Subject) -> Subject:
    """Return the subject with a subset of its samples, if the effort limits them.

    First come samples in which other arguments are tensors, or have other numbers of dimensions, or no
    elements; then the others in turn.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> len(sample_subset(subject_of(opsmith.ops.linear, None, 0, EFFORTS["quick"])).samples)
        4
    """
    enough = subject.effort.subset
    if len(subject.samples) <= enough:
        return subject
    kinds: dict[tuple[Any, ...], Sample] = {}
    for sample in subject.samples:
        kinds.setdefault(_kind(sample), sample)
    first = [*kinds.values()]
    chosen = _positions(
        [*first, *(each for each in subject.samples if each.position not in _positions(first))][:enough]
    )
    return replace(subject, samples=tuple(each for each in subject.samples if each.position in chosen))


def subset_remarks(subject: Subject, ran: Iterable[str]) -> tuple[str, ...]:
    """Return the remark for a report.

    Args:
        subject: The checked operator.
        ran: Names of the properties that ran on the subset.
    """
    few = len(sample_subset(subject).samples)
    names = ", ".join(f"`{name}`" for name in ran)
    if few == len(subject.samples) or not names:
        return ()
    return (f"{names} looked at {few} of the {len(subject.samples)} samples: the effort is `quick`",)


def _positions(samples: Sequence[Sample]) -> set[int]:
    return {sample.position for sample in samples}


def _kind(sample: Sample) -> tuple[Any, ...]:
    """Return what distinguishes samples: their tensors, ranks and dtypes, and those that are empty."""
    return tuple(
        (value.dim(), value.dtype, bool(value.numel())) if isinstance(value, Tensor) else type(value)
        for value in sample.flat
    )


def among_symmetric(subject: Subject) -> Subject:
    """Return the subject with the symmetric inputs marked that it reads in one triangle alone.

    Args:
        subject: The checked operator.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> among_symmetric(subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])).symmetric
        frozenset()
    """
    labels = set[str]()
    if not subject.draws:
        every = [_of_one_triangle(subject, sample) for sample in subject.samples]
        labels = set.intersection(*every)
    return replace(subject, symmetric=frozenset(labels)) if labels else subject


def symmetric_remarks(subject: Subject) -> tuple[str, ...]:
    """Return the remark for a report."""
    if not subject.symmetric:
        return ()
    names = ", ".join(f"`{label}`" for label in sorted(subject.symmetric))
    return (
        f"derivatives by {names} are those among symmetric matrices: every sample has one there, of which "
        "one triangle alone is read",
    )


def _of_one_triangle(subject: Subject, sample: Sample) -> set[str]:
    """Return the labels of a sample's symmetric matrices that are read in one triangle alone."""
    return {
        sample.labels[argnum]
        for argnum in sample.inexact
        if is_symmetric(sample.flat[argnum]) and _reads_one(subject, sample, argnum)
    }


def _reads_one(subject: Subject, sample: Sample, argnum: int) -> bool:
    wide = sample.at(torch.float64)

    def results(value: Tensor) -> list[Any]:
        flat = [value if at == argnum else each for at, each in enumerate(wide)]
        return subject.reference(sample, flat)

    # Suppressed: if it raises for a matrix that is not symmetric, it reads all of it.
    with Overlooking(), torch.no_grad():
        matrix = wide[argnum]
        whole = results(matrix)
        return _same_results(whole, results(matrix + matrix.triu(1))) or _same_results(
            whole, results(matrix + matrix.tril(-1))
        )
    return False


def _same_results(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one is other
        for one, other in zip(some, others, strict=True)
    )
