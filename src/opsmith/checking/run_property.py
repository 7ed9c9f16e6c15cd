"""Run one property, in a child process where asked, and merge its findings into an outcome."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from opsmith.checking.causes import UNKNOWN, explained_by, first_of
from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.processes.fork import isolated
from opsmith.checking.properties.kernels.sizes import kernels_in_cpp
from opsmith.checking.property import Note, Property, Skipped, raised
from opsmith.checking.report import Failure, Outcome, Status, all_dtypes, with_dtypes
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import quiet
from opsmith.checking.subject import Subject
from opsmith.core.calls import tensors_in


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


READ_OFF = frozenset(
    {
        "missing-gradient",
        "missing-term",
        "nan",
        "precision",
        "region",
        "scale",
        "shifted",
        "sign",
        "swapped-inputs",
        "transposed",
        "unreduced-broadcast",
        UNKNOWN,
    }
)
"""Causes that are read off the numbers. Where samples disagree, it is what all of them fit."""

FEW = 4
"""A tensor of fewer elements fits too many words: another sample may know better."""


def merged(failures: Sequence[Failure], samples: Sequence[Sample] = ()) -> tuple[Failure, ...]:
    """One failure for each thing that is wrong, however many samples, dtypes and layouts show it.

    Args:
        failures: What one property found.
        samples: What it looked at.
    """
    groups: dict[tuple[Any, ...], list[Failure]] = {}
    for failure in failures:
        read_off = failure.cause in READ_OFF
        key = (failure.property, failure.input, "read off" if read_off else failure.cause, failure.where)
        groups.setdefault(key, []).append(failure)
    return tuple(_of_nothing(_one(group), group, samples) for group in groups.values())


def _one(group: list[Failure]) -> Failure:
    causes = {failure.cause for failure in group}
    if len(causes) == 1:
        return _seen(group[0], group)
    fitting = set.intersection(*(_fitting(failure) for failure in group)) - {UNKNOWN}
    if fitting:
        cause = first_of(fitting)
        best = next((failure for failure in group if failure.cause == cause), group[0])
        return _seen(replace(best, cause=cause), group)
    telling = [failure for failure in group if _elements(failure) >= FEW]
    if telling and len({failure.cause for failure in telling}) == 1:
        return _seen(telling[0], group)
    evidence = {**group[0].evidence, "looks like": ", ".join(sorted(causes))}
    return _seen(replace(group[0], cause=UNKNOWN, evidence=evidence), group)


def _of_nothing(failure: Failure, group: Sequence[Failure], samples: Sequence[Sample]) -> Failure:
    """The failure, which is about tensors without elements if it was seen on no other."""
    empty = {
        str(sample): not all(value.numel() for value in tensors_in(list(sample.flat))) for sample in samples
    }
    seen = [name for name in empty for each in group if str(each.evidence.get("sample", "")).startswith(name)]
    if len(seen) < len(group) or not all(empty[name] for name in seen) or all(empty.values()):
        return failure
    message = f"of tensors without elements alone: {failure.message}"
    return replace(failure, cause="empty", message=message)


def _fitting(failure: Failure) -> set[str]:
    """Every cause that a failure's evidence bears out."""
    return {failure.cause, *failure.evidence.get("also fits", ())}


def _elements(failure: Failure) -> int:
    """How many elements the wrong tensor has; none where nothing says it."""
    return int(str(failure.evidence.get("wrong elements", "0 of 0")).rpartition(" ")[2])


def _seen(failure: Failure, group: Sequence[Failure]) -> Failure:
    if len(group) == 1:
        return failure
    evidence = {**failure.evidence, "seen": f"in {len(group)} runs; one is shown"}
    return replace(failure, evidence=evidence, dtypes=all_dtypes(group))


def referred(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes, where each failure that another one explains names the property of that one.

    A failure of the same input in a property that looks at what a backward gives follows from the failure of
    `linearity` or `gradient`, in this order. One in the same words follows from the first that says them, and
    one of tracing, mapping or copying from what is wrong with the operator itself.

    Args:
        outcomes: In the order in which a reader sees them.
    """
    every = [failure for outcome in outcomes for failure in outcome.failures]
    by_input = {root: {failure.input for failure in every if failure.property == root} for root in ROOTS}
    said: dict[tuple[str, str], str] = {}
    answers: list[Outcome] = []
    before: list[Failure] = []
    for outcome in outcomes:
        failures = [_referred(failure, by_input, said, before) for failure in outcome.failures]
        before += failures
        answers.append(replace(outcome, failures=tuple(failures)))
        for failure in outcome.failures:
            said.setdefault((failure.cause, _words(failure)), failure.property)
    return answers


ROOTS = ("linearity", "gradient")
"""Properties whose failure for an input explains what others find of its gradient, the first one first."""

NOT_ABOUT_GRADIENTS = frozenset({"forward", "fake", "randomness", "linearity"})
"""Properties whose failures no wrong gradient explains."""


def _referred(
    failure: Failure,
    by_input: dict[str, set[str | None]],
    said: dict[tuple[str, str], str],
    before: Sequence[Failure],
) -> Failure:
    earlier = said.get((failure.cause, _words(failure)))
    if earlier is None and failure.input and failure.property not in NOT_ABOUT_GRADIENTS:
        mine = _inputs(failure.input)
        roots = [root for root in ROOTS if root != failure.property and mine & _all_inputs(by_input[root])]
        earlier = roots[0] if roots else None
    earlier = earlier or explained_by(failure, before)
    return replace(failure, follows=earlier if earlier != failure.property else None)


def _words(failure: Failure) -> str:
    """What a failure says, as far as another property would say the same of the same fault.

    Of an exception that is what was raised, and not for which inputs; of a death its signal, and the line.
    """
    if "signal" in failure.evidence:
        return f"{failure.evidence['signal']} at {failure.where}"
    reason = failure.evidence.get("also fits", {}).get("input-needs-grad")
    return failure.message.removesuffix(f"; {reason}") if failure.cause == "raises" else failure.message


def _inputs(text: str | None) -> set[str]:
    """The inputs that a failure names: `x, weight` are two."""
    return set(text.split(", ")) if text else set()


def _all_inputs(texts: Iterable[str | None]) -> set[str]:
    return {each for text in texts for each in _inputs(text)}
