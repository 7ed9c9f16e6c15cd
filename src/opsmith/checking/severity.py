"""Severity of failures: an error, a warning or a limit, by one table of what happened and what was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from opsmith.checking.calls import leaves_out
from opsmith.checking.causes import CAUSES, Happened
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.property import BY_ITSELF, IN_BACKWARD, MISSING_HERE, REFUSED, UNCOMPILED
from opsmith.checking.report import GIVEN, Failure, Given, Outcome, Severity
from opsmith.checking.samples.cases import LOW_PRECISION, dtype_name
from opsmith.checking.samples.sample import shown_sample
from opsmith.checking.subject import Subject

TABLE: Mapping[Given, Mapping[Happened, Severity]] = MappingProxyType(
    {
        "usual": {"wrong": "error", "raises": "error"},
        "undeclared": {"wrong": "error", "raises": "limit"},
        "strained": {"wrong": "warning", "raises": "limit"},
        "unpromised": {"wrong": "warning", "raises": "limit"},
    }
)
"""The severity of wrong numbers, shapes and side effects, and of exceptions, by the circumstance."""

WHATEVER: Mapping[Happened, Severity] = MappingProxyType(
    {"damage": "error", "minor": "warning", "less": "limit"}
)
"""The severity of everything else, whatever the circumstance."""

FEW_DIGITS = frozenset({*map(dtype_name, LOW_PRECISION), "complex32"})
"""dtypes of few digits, in which an operator is tried without a sample."""


def circumstance(failure: Failure, subject: Subject) -> Given:
    """The circumstance of a failure: the last of those that apply to its property, its sample and its dtypes.

    Args:
        failure: A failure of one property.
        subject: The subject of the check, with the samples that the property ran on.
    """
    if UNCOMPILED in failure.evidence:
        return "usual"
    known = PROPERTIES[failure.property].given
    found: set[Given] = {failure.given, known(subject) if callable(known) else known}
    sample = shown_sample(str(failure.evidence.get("sample", "")), subject.samples)
    if sample is not None and not (sample.is_emptied and _is_of_backward(failure)):
        found.add(sample.given)
    change = None if sample is None else sample.change
    if change is not None and change.uneven and subject.kind.own_forward and "exception" in failure.evidence:
        found.add("strained")  # a class says nowhere what it takes, and refuses it where a backward raises
    authors = [each for each in subject.samples if not each.origin]
    declared = {dtype_name(each.flat[at].dtype) for each in authors for at in each.inexact}
    few = bool(failure.dtypes) and {*failure.dtypes} <= FEW_DIGITS - declared
    if few and not _is_of_backward(failure):
        found.add("strained" if change is not None and change.rescaled else "undeclared")
    if failure.cause == "missing-gradient" and leaves_out(subject, failure.input or ""):
        found.add("unpromised")
    return max(found, key=GIVEN.index)


def _is_of_backward(failure: Failure) -> bool:
    """True for an exception of a backward: a forward that returned has promised it, in any dtype and size."""
    return PROPERTIES[failure.property].explains_gradients and IN_BACKWARD in failure.evidence


def happened(failure: Failure) -> Happened:
    """What a failure says that happened."""
    known = CAUSES[failure.cause].happened
    if failure.ends_process() or known == "damage":
        return "damage"
    if MISSING_HERE in failure.evidence:
        return "less"
    if UNCOMPILED in failure.evidence:
        return "wrong"
    if known == "raises" or (failure.cause == "empty" and "exception" in failure.evidence):
        refuses = REFUSED in failure.evidence
        refuses |= failure.property == "second_order" and BY_ITSELF in failure.evidence
        return "less" if refuses else "raises"
    return "minor" if failure.minor and known == "wrong" else known


def graded(outcome: Outcome) -> Outcome:
    """The outcome with the severity of each failure; without an error, it is not failed.

    Args:
        outcome: The outcome of a property.
    """
    failures = tuple(replace(each, severity=severity_of(each)) for each in outcome.failures)
    return with_status(replace(outcome, failures=failures))


def severity_of(failure: Failure) -> Severity:
    """The severity by the table."""
    what = happened(failure)
    return WHATEVER[what] if what in WHATEVER else TABLE[failure.given][what]


def with_status(outcome: Outcome) -> Outcome:
    """The outcome with the status that its failures give."""
    if any(failure.is_error() for failure in outcome.failures):
        return replace(outcome, status="failed")
    if outcome.status != "failed":
        return outcome
    return replace(outcome, status="skipped" if outcome.reason else "passed")
