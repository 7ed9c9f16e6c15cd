"""Run one property on its samples, in a child process if requested, and merge its failures into an
outcome."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from opsmith.checking.causes import CAUSES, UNKNOWN, first_of
from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import refuse_own, watched_calls
from opsmith.checking.processes.fork import run_isolated
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.property import Note, Property, Skipped, endless, missing_here, raised
from opsmith.checking.report import GIVEN, Failure, Outcome, Status, ordered
from opsmith.checking.samples.sample import Sample, shown_sample
from opsmith.checking.samples.variations import stands_alone
from opsmith.checking.severity import circumstance
from opsmith.checking.side_effects.global_settings import (
    random_states_restored,
    thread_count,
    without_logs,
    without_warnings,
)
from opsmith.checking.side_effects.steady_runs import DERIVED
from opsmith.checking.subject import Subject

_NAMED = re.compile(r" in (\w+) on \w+$")
"""Pattern of a sample with its dtype in evidence."""


def run(known: Property, subject: Subject, limit_s: float) -> Outcome:
    """Run one property.

    Args:
        limit_s: Seconds that it may take in a child process; 0 for none.
    """
    found = in_child_process(known.name, subject, limit_s, lambda: _outcome(known, subject))
    return replace(found, compiles="compiles" in known.traits)


def in_child_process(name: str, subject: Subject, limit_s: float, begin: Callable[[], Outcome]) -> Outcome:
    """Run a function for a subject, by default in a child process with a limit; a crash is reported with its
    line.

    Args:
        name: Name of the property that reports the death of the process.
        limit_s: Seconds that the function may take; 0 to run it in this process.
    """
    if not limit_s:
        return begin()
    specification = subject.specification
    kernels = specification.kernels
    positions = range(len(kernels))
    return run_isolated(
        name, begin, where=specification.where, limit_s=limit_s, kernels=kernels, positions=positions
    )


def few_threads(effort: Effort) -> AbstractContextManager[None]:
    """Return a region with one thread; a thorough check keeps all, as a kernel may fail with several."""
    return thread_count(torch.get_num_threads() if effort.exhaustive else 1)


def _outcome(known: Property, subject: Subject) -> Outcome:
    """Run one property in this process, and make its outcome."""
    failures: list[Failure] = []
    notes: dict[str, None] = {}
    reasons: list[str] = []
    start, kernels = time.perf_counter(), subject.specification.kernels
    subject.ran.seen.clear()
    subject.ran.kernels.clear()
    watchdog = watched_calls()
    try:
        # An operator would repeat its warnings, and torch its logs, hundreds of times.
        with (
            without_warnings(),
            without_logs(),
            few_threads(subject.effort),
            nullcontext() if subject.steady is None else random_states_restored(),
            nullcontext() if subject.outside is None else subject.outside.fresh(),
            nullcontext() if "compiles" in known.traits else watchdog,
        ):
            for finding in known.run(subject):
                if isinstance(finding, Failure):
                    named = _NAMED.search(str(finding.evidence.get("sample", "")))
                    dtypes = finding.dtypes or ((named[1],) if named else ())
                    failures.append(replace(finding, dtypes=dtypes))
                elif isinstance(finding, Note):
                    notes[finding.text] = None
                elif isinstance(finding, Skipped):
                    reasons.append(str(finding))
    except EndlessCallError as error:
        failures.append(endless(known.name, subject.specification.where, error, watchdog))
    except BaseException as error:
        refuse_own(error)
        failures.append(raised(known.name, subject, error, "all samples"))
    seconds = time.perf_counter() - start
    reasons += filter(None, [missing_here(failures)])
    failures, refused = _without_refusals(subject, failures)
    failures = [replace(each, given=circumstance(each, subject)) for each in failures]
    notes.update(dict.fromkeys(refused))
    status: Status = "failed" if failures else "skipped" if reasons else "passed"
    return Outcome(
        known.name,
        status,
        "; ".join(dict.fromkeys(reasons)),
        seconds,
        merged(failures, subject.samples),
        tuple(notes),
        dtypes=subject.ran.names(),
        kernels=tuple(at for at, each in enumerate(kernels) if each in subject.ran.kernels),
    )


def _without_refusals(subject: Subject, failures: Sequence[Failure]) -> tuple[list[Failure], list[str]]:
    """Return the failures of a class; failures on rows without elements are replaced by notes.

    On such rows, a forward may have a result where the backward raises, as in a mean or a `reshape(-1, 0)`. A
    class promises nothing there, unless the dimension is batch-like; with a reference, the reference does.
    """
    if subject.specification.kernels or subject.kind.in_library or subject.kind.has_reference:
        return [*failures], []
    left, refused = [], []
    for failure in failures:
        sample = shown_sample(failure, subject.samples)
        change = None if sample is None else sample.change
        raises = failure.cause == "raises" and "exception" in failure.evidence
        without = None if change is None or not raises else change.without
        if change is None or without is None or stands_alone(subject, change.of, without):
            left.append(failure)
        else:
            words = f"{sample} has rows without elements, and the backward of a class may raise for them"
            refused.append(f"{words}: {failure.message}")
    return left, refused


FEW = 4
"""Minimum number of elements that decides between causes."""


def merged(failures: Sequence[Failure], samples: Sequence[Sample] = ()) -> tuple[Failure, ...]:
    """One failure for each fault, however many samples, dtypes and layouts show it.

    Each gets the most usual circumstance, and shows a failure that was seen in this circumstance.

    Args:
        failures: Failures of one property.
        samples: Samples that it ran on.
    """
    groups: dict[tuple[Any, ...], list[Failure]] = {}
    for failure in sorted(failures, key=lambda each: GIVEN.index(each.given)):
        cause = "numeric" if CAUSES[failure.cause].numeric else failure.cause
        groups.setdefault((failure.property, failure.input, cause, failure.where), []).append(failure)
    return tuple(_seen_on(_one(group), group, samples) for group in groups.values())


def _one(every: list[Failure]) -> Failure:
    group = [each for each in every if not each.minor] or every  # an approximation shows in every sample
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


def _seen_on(failure: Failure, group: Sequence[Failure], samples: Sequence[Sample]) -> Failure:
    """The failure; with the cause `empty`, or with the derived inputs as evidence, if only these show it.

    The cause is `empty` if only tensors without elements show it. If two runs differ only on derived inputs,
    properties that compare runs leave these inputs out.
    """
    seen = [shown_sample(each, samples) for each in group]
    if not all(sample.is_empty for sample in samples) and all(
        sample is not None and sample.is_empty for sample in seen
    ):
        message = f"only for tensors without elements: {failure.message}"
        failure = replace(failure, cause="empty", message=message)
    derived = dict.fromkeys(each.position for each in seen if each is not None and each.origin)
    alone = all(each is not None and each.origin for each in seen)
    if not alone or not CAUSES[failure.cause].unsteady:
        return failure
    return replace(failure, evidence={**failure.evidence, DERIVED: ", ".join(map(str, derived))})


def _elements(failure: Failure) -> int:
    """Number of elements of the wrong tensor; 0 if the evidence does not name it."""
    return int(str(failure.evidence.get("wrong elements", "0 of 0")).rpartition(" ")[2])


def _seen(failure: Failure, group: Sequence[Failure]) -> Failure:
    if len(group) == 1:
        return failure
    evidence = {**failure.evidence, "seen": f"in {len(group)} runs; one run is shown"}
    given = min((each.given for each in group), key=GIVEN.index)
    minor = all(each.minor for each in group)
    bound = all(each.dtypes for each in group)  # it is bound to some dtypes
    dtypes = ordered(name for each in group for name in each.dtypes) if bound else ()
    return replace(failure, evidence=evidence, dtypes=dtypes, given=given, minor=minor)
