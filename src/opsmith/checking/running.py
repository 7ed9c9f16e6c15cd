"""One property is run, in a child process where that is asked: what it finds, sorted, and its time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from opsmith.checking.dtypes import with_dtypes
from opsmith.checking.effort import Effort
from opsmith.checking.isolation import isolated
from opsmith.checking.merging import merged
from opsmith.checking.mistakes import refuse_own
from opsmith.checking.natives import kernels_in_cpp
from opsmith.checking.property import Note, Property, Skipped, raised
from opsmith.checking.quiet import quiet
from opsmith.checking.report import Failure, Outcome, Status
from opsmith.checking.subject import Subject


def run(known: Property, subject: Subject, limit_s: float) -> Outcome:
    """Run one property.

    Args:
        known: The property.
        subject: What is under check.
        limit_s: Seconds that it may take in a child process; 0 for none.
    """
    if not limit_s:
        return _outcome(known, subject)
    place = subject.specification.where
    kernels = kernels_in_cpp(subject.specification)
    found = isolated(
        known.name, lambda: _outcome(known, subject), where=place, limit_s=limit_s, kernels=kernels
    )
    return replace(found, apart=known.apart)


@contextmanager
def few_threads(effort: Effort) -> Iterator[None]:
    """A region with one thread: on tensors of a few elements torch's threads wait longer than they compute.

    A thorough check leaves them as they are, since a kernel may be wrong with several alone.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(before if effort.name == "thorough" else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _outcome(known: Property, subject: Subject) -> Outcome:
    """Run one property, and sort what it finds."""
    failures: list[Failure] = []
    notes: dict[str, None] = {}
    reasons: list[str] = []
    start = time.perf_counter()
    subject.ran.seen.clear()
    try:
        # What an operator warns of, it would warn of hundreds of times.
        with quiet(), few_threads(subject.effort):
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
        apart=known.apart,
        dtypes=subject.ran.names(),
    )
