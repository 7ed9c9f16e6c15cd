"""Severity of failures, by one table of events and circumstances, and their root causes.

The root cause of a failure is an earlier failure of a different property that explains it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from opsmith.checking.calls import leaves_out
from opsmith.checking.causes import CAUSES, UNKNOWN, Happened
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.properties.behaviour.randomness import FOREIGN_STATE
from opsmith.checking.properties.numeric.gradient import RIGHT_WITH_REFERENCE
from opsmith.checking.property import BY_ITSELF, IMPORTED, IN_BACKWARD, MISSING_HERE, REFUSED, UNCOMPILED
from opsmith.checking.report import GIVEN, RESULT, SEVERITIES, Failure, Given, Outcome, Severity
from opsmith.checking.samples.cases import LOW_PRECISION, dtype_name
from opsmith.checking.samples.sample import Sample, shown_sample
from opsmith.checking.side_effects.steady_runs import DIFFERS
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
"""The severity of all other kinds of events, in every circumstance."""

FEW_DIGITS = frozenset({*map(dtype_name, LOW_PRECISION), "complex32"})
"""dtypes of few digits, in which an operator is tried even if no sample has this dtype."""

SINGLE, DOUBLE = frozenset({"float32", "complex64"}), frozenset({"float64", "complex128"})


def circumstance(failure: Failure, subject: Subject) -> Given:
    """The circumstance of a failure: the last that applies to its property, its sample and its dtypes.

    Args:
        failure: A failure of one property.
        subject: The subject of the check, with the samples that the property ran on.
    """
    if UNCOMPILED in failure.evidence:
        return "usual"
    known = PROPERTIES[failure.property].given
    found: set[Given] = {failure.given, known(subject) if callable(known) else known}
    sample = shown_sample(failure, subject.samples)
    if sample is not None and not (sample.is_emptied and _is_of_backward(failure)):
        found.add(sample.given)
    change = None if sample is None else sample.change
    if change is not None and change.uneven and subject.kind.own_forward and "exception" in failure.evidence:
        found.add("strained")  # its backward refuses
    seen_write = failure.cause == "mutates-input" and "exception" not in failure.evidence  # no broken rule
    if seen_write and sample is not None and _asks_in_place(sample):
        found.add("strained")
    authors = [each for each in subject.samples if not each.origin]
    declared = {dtype_name(each.flat[at].dtype) for each in authors for at in each.inexact}
    # An iteration to a tolerance of float64 may not converge in float32.
    single = SINGLE if subject.kind.own_forward and declared <= DOUBLE else frozenset[str]()
    few = bool(failure.dtypes) and {*failure.dtypes} <= (FEW_DIGITS - declared) | single
    if few and not _is_of_backward(failure):
        found.add("strained" if change is not None and change.rescaled else "undeclared")
    missing = failure.cause == "missing-gradient" or failure.property == "values"
    if missing and leaves_out(subject, failure.input or ""):
        found.add("unpromised")
    return max(found, key=GIVEN.index)


IN_PLACE = re.compile(r"in_?place|overwrite|mutat|destroy", re.IGNORECASE)
"""Words in the names of flags that let a call write into an argument."""


def _asks_in_place(sample: Sample) -> bool:
    """True if a flag that no author's sample sets, and whose name allows writing into an argument, is set."""
    if sample.change is None:
        return False
    flags = zip(sample.names, sample.change.of.flat, sample.flat, strict=True)
    return any(had is False and now is True and IN_PLACE.search(name) for name, had, now in flags)


def _is_of_backward(failure: Failure) -> bool:
    """True for an exception of a backward, which a forward promises by returning, in any dtype and size."""
    return "explains-gradients" in PROPERTIES[failure.property].traits and IN_BACKWARD in failure.evidence


def happened(failure: Failure) -> Happened:
    """Kind of event that a failure reports."""
    known = CAUSES[failure.cause].happened
    if (failure.ends_process() and "limit" not in failure.evidence) or known == "damage":
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
    """The outcome with the severity of each failure; it has failed only if there is an error."""
    failures = tuple(replace(each, severity=severity_of(each)) for each in outcome.failures)
    return with_status(replace(outcome, failures=failures))


def severity_of(failure: Failure) -> Severity:
    """The severity of a failure, by the table."""
    what = happened(failure)
    return WHATEVER[what] if what in WHATEVER else TABLE[failure.given][what]


def with_status(outcome: Outcome) -> Outcome:
    """The outcome with the status that follows from its failures."""
    if any(failure.is_error() for failure in outcome.failures):
        return replace(outcome, status="failed")
    if outcome.status != "failed":
        return outcome
    return replace(outcome, status="skipped" if outcome.reason else "passed")


def name_roots(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Set `follows` of each failure that another failure explains.

    Args:
        outcomes: The outcomes, in the order of reports.
    """
    every = [failure for outcome in outcomes for failure in outcome.failures]
    named: list[Outcome] = []
    before: list[Failure] = []
    for outcome in outcomes:
        failures = [replace(each, follows=explained_by(each, before, every)) for each in outcome.failures]
        before += failures
        named.append(replace(outcome, failures=tuple(failures)))
    return named


def explained_by(failure: Failure, before: Sequence[Failure], every: Sequence[Failure] = ()) -> str | None:
    """Name of the property whose failure explains a failure of a later property; None if there is none.

    Args:
        before: The failures of the properties before it, in the order of reports.
        every: The failures of all properties.
    """
    worst = SEVERITIES.index(failure.severity)  # a warning or a limit explains no error
    for rule in RULES:
        found = (
            each
            for each in rule(failure, every if rule in LATER else before)
            if each.property != failure.property and SEVERITIES.index(each.severity) <= worst
        )
        if (root := next(found, None)) is not None:
            return root.property
    return None


def same_words(failure: Failure, before: Sequence[Failure]) -> Iterator[Failure]:
    """The failures that report the same fault in the same words."""

    def words(failure: Failure) -> str:
        """The message without the parts that differ between properties; for a crash, its signal and line."""
        if "signal" in failure.evidence:
            return f"{failure.evidence['signal']} at {failure.where}"
        reason = failure.evidence.get("also fits", {}).get("input-needs-grad")
        return failure.message.removesuffix(f"; {reason}") if failure.cause == "raises" else failure.message

    own = words(failure)
    yield from (each for each in before if each.cause == failure.cause and words(each) == own)


def wrong_gradient(failure: Failure, every: Sequence[Failure]) -> Iterator[Failure]:
    """Mark failures about a gradient that is known to be wrong as its consequences.

    A write into an input, or a result that is wrong for one layout of it, does not concern its gradient.
    """

    def inputs(failure: Failure) -> set[str]:
        """The inputs that a failure names: `x, weight` names two."""
        return set(failure.input.split(", ")) if failure.input else set()

    roots = [name for name, known in PROPERTIES.items() if "explains-gradients" in known.traits]
    about_results = RESULT in failure.evidence or "about-results" in PROPERTIES[failure.property].traits
    for name in [] if about_results or failure.cause in OF_ARGUMENTS else roots:
        yield from (each for each in every if each.property == name and inputs(each) & inputs(failure))


OF_ARGUMENTS = ("mutates-input", "not-written", "overwritten", "version", "aliases-input", "side-effect")
"""Causes that describe what a call does to an argument itself."""


def undeclared_randomness(failure: Failure, every: Sequence[Failure]) -> Iterator[Failure]:
    """Explain different numbers in a second run by undeclared random numbers.

    The check restores the random state before each call, but not before each forward within a call.
    """
    drawn = [each for each in every if each.property == "randomness" and CAUSES[each.cause].unsteady]
    if CAUSES[failure.cause].compares and "reruns" in PROPERTIES[failure.property].traits:
        yield from drawn
    if DIFFERS in failure.evidence:  # torch chooses the seeds of these two runs, which may differ
        yield from (each for each in drawn if FOREIGN_STATE in each.evidence)


WRONG_ELEMENTS = ("not-written", "overwritten")
"""Causes of an in-place call that writes different elements than the reference."""

WRONG_NUMBERS = ("kernel-mismatch", "nan", *WRONG_ELEMENTS)
"""Causes of results whose gradients differ from autograd's through the reference."""


def wrong_write(failure: Failure, every: Sequence[Failure]) -> Iterator[Failure]:
    """Explain a wrong new value of an argument by an in-place call that writes too much or too little."""
    for each in every:
        about = failure.input is not None and failure.input in (each.input, f"result_{each.input}")
        if each.property == "mutation" and about and each.cause in (*WRONG_ELEMENTS, failure.cause):
            yield each


def unsteady_backward(failure: Failure, before: Sequence[Failure]) -> Iterator[Failure]:
    """Explain why a second backward through the same graph differs, if gradients differ between runs."""
    if failure.property == "effects" and failure.cause == "mutates-saved" and failure.input is not None:
        found = (each for each in before if each.property == "determinism")
        yield from (
            each for each in found if each.cause == "nondeterministic" and each.input == failure.input
        )


def wrong_results(failure: Failure, before: Sequence[Failure]) -> Iterator[Failure]:
    """Explain gradients that contradict the results, or are computed from them, by wrong results."""
    traits = PROPERTIES[failure.property].traits
    for each in () if "transforms" in traits else before:
        if each.property not in ("forward", "mutation") or each.follows is not None:
            continue
        misfit = "sends-gradients" in traits and "exception" in failure.evidence and each.cause == "shape"
        contradicted = failure.evidence.get("reverse mode") == "wrong as well"
        saved = (each.input or "").partition("[")[0] in failure.evidence.get(RIGHT_WITH_REFERENCE, ())
        if misfit or saved or (contradicted and each.cause in WRONG_NUMBERS):
            yield each


def broken_operator(failure: Failure, before: Sequence[Failure]) -> Iterator[Failure]:
    """Explain failures of tracing, mapping, copying or compiling by a fault of the operator itself."""
    if "transforms" not in PROPERTIES[failure.property].traits:
        return
    roots = [each for each in before if each.follows is None]
    yield from (each for each in roots if each.cause == failure.cause != UNKNOWN)
    yield from (each for each in roots if failure.input is not None and each.input == failure.input)
    if CAUSES[failure.cause].broad:
        yield from (each for each in roots if CAUSES[each.cause].root and IMPORTED not in each.evidence)


RULES = (
    same_words,
    wrong_gradient,
    wrong_write,
    undeclared_randomness,
    unsteady_backward,
    wrong_results,
    broken_operator,
)
"""The rules in order: the first rule that finds a failure names the root."""

LATER = (wrong_gradient, wrong_write, undeclared_randomness)
"""Rules that also look at the failures of later properties."""
