"""Root causes: the earlier failure, of another property, that explains a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from opsmith.checking.causes import CAUSES, UNKNOWN
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.properties.behaviour.randomness import FOREIGN_STATE
from opsmith.checking.properties.numeric.gradient import RIGHT_WITH_REFERENCE
from opsmith.checking.property import IMPORTED
from opsmith.checking.report import SEVERITIES, Failure, Outcome
from opsmith.checking.side_effects.steady_runs import DIFFERS


def name_roots(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Set `follows` of each failure that another one explains.

    Args:
        outcomes: In the order of reports.
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
    """Name of the property whose failure explains one of another property; None where none does.

    Args:
        failure: The failure.
        before: The failures of the properties before it, in the order of reports.
        every: The failures of all properties.
    """
    for rule in RULES:
        others = [each for each in (every if rule.later else before) if each.property != failure.property]
        found = next(rule.roots(failure, [each for each in others if _as_severe(each, failure)]), None)
        if found is not None:
            return found.property
    return None


@dataclass(frozen=True)
class RootRule:
    """A rule that finds the root causes of a failure.

    Args:
        roots: Yields those among some failures of other properties.
        later: It looks at the failures of later properties, too.
    """

    roots: Callable[[Failure, Sequence[Failure]], Iterator[Failure]]
    later: bool = False


def _as_severe(root: Failure, failure: Failure) -> bool:
    """True if a failure may explain another: a warning or a limit explains no error."""
    return SEVERITIES.index(root.severity) <= SEVERITIES.index(failure.severity)


def same_words(failure: Failure, before: Sequence[Failure]) -> Iterator[Failure]:
    """The failures that report the same fault in the same words."""
    words = _words(failure)
    yield from (each for each in before if each.cause == failure.cause and _words(each) == words)


def _words(failure: Failure) -> str:
    """The words of a failure, without those that differ from property to property.

    For an exception they are its message, for a crash its signal and the line.
    """
    if "signal" in failure.evidence:
        return f"{failure.evidence['signal']} at {failure.where}"
    reason = failure.evidence.get("also fits", {}).get("input-needs-grad")
    return failure.message.removesuffix(f"; {reason}") if failure.cause == "raises" else failure.message


def wrong_gradient(failure: Failure, every: Sequence[Failure]) -> Iterator[Failure]:
    """Explain failures of other properties about a gradient by a wrong gradient of the same input."""
    if PROPERTIES[failure.property].about_gradients:
        for name, known in PROPERTIES.items():
            if known.explains_gradients:
                own = (each for each in every if each.property == name)
                yield from (each for each in own if _inputs(each) & _inputs(failure))


def _inputs(failure: Failure) -> set[str]:
    """The inputs that a failure names: `x, weight` are two."""
    return set(failure.input.split(", ")) if failure.input else set()


def undeclared_randomness(failure: Failure, every: Sequence[Failure]) -> Iterator[Failure]:
    """Explain other numbers in a second run by random numbers that are not declared.

    The check begins each call with the same ones, but not each run of the forward within a call.
    """
    drawn = [each for each in every if each.property == "randomness" and CAUSES[each.cause].unsteady]
    if CAUSES[failure.cause].compares and PROPERTIES[failure.property].reruns:
        yield from drawn
    if DIFFERS in failure.evidence:  # the seeds of two runs, which may differ, are torch's
        yield from (each for each in drawn if FOREIGN_STATE in each.evidence)


WRONG_ELEMENTS = ("not-written", "overwritten")
"""Causes of a call in place that writes other elements than the reference."""

WRONG_NUMBERS = ("kernel-mismatch", "nan", *WRONG_ELEMENTS)
"""Causes of results that autograd through the reference does not fit."""


def wrong_write(failure: Failure, every: Sequence[Failure]) -> Iterator[Failure]:
    """Explain a wrong new value of an argument by what a call in place writes, or does not write."""
    for each in every:
        about = failure.input is not None and failure.input in (each.input, f"result_{each.input}")
        if each.property == "mutation" and about and each.cause in (*WRONG_ELEMENTS, failure.cause):
            yield each


def unsteady_backward(failure: Failure, before: Sequence[Failure]) -> Iterator[Failure]:
    """Explain a different second backward through the same graph by unsteady gradients."""
    if failure.property == "effects" and failure.cause == "mutates-saved" and failure.input is not None:
        found = (each for each in before if each.property == "determinism")
        yield from (
            each for each in found if each.cause == "nondeterministic" and each.input == failure.input
        )


def wrong_results(failure: Failure, before: Sequence[Failure]) -> Iterator[Failure]:
    """Explain gradients that do not fit the results, or are made of them, by wrong results."""
    known = PROPERTIES[failure.property]
    for each in () if known.transforms else before:
        if each.property not in ("forward", "mutation") or each.follows is not None:
            continue
        misfit = known.sends_gradients and "exception" in failure.evidence and each.cause == "shape"
        contradicted = failure.evidence.get("reverse mode") == "wrong as well"
        saved = (each.input or "").partition("[")[0] in failure.evidence.get(RIGHT_WITH_REFERENCE, ())
        if misfit or saved or (contradicted and each.cause in WRONG_NUMBERS):
            yield each


def broken_operator(failure: Failure, before: Sequence[Failure]) -> Iterator[Failure]:
    """Explain failures of tracing, mapping, copying or compiling by a fault of the operator itself."""
    if not PROPERTIES[failure.property].transforms:
        return
    roots = [each for each in before if each.follows is None]
    yield from (each for each in roots if each.cause == failure.cause != UNKNOWN)
    yield from (each for each in roots if failure.input is not None and each.input == failure.input)
    if CAUSES[failure.cause].broad:
        yield from (each for each in roots if CAUSES[each.cause].root and IMPORTED not in each.evidence)


RULES = (
    RootRule(same_words),
    RootRule(wrong_gradient, later=True),
    RootRule(wrong_write, later=True),
    RootRule(undeclared_randomness, later=True),
    RootRule(unsteady_backward),
    RootRule(wrong_results),
    RootRule(broken_operator),
)
"""The rules in order: the first that finds a failure names the root."""
