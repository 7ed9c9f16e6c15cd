"""One failure for each thing that is wrong, however many samples, dtypes, layouts and properties show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.hypotheses import GUESSES
from opsmith.checking.report import Failure, Outcome

GUESSED = frozenset({UNKNOWN, *GUESSES, "ignores-grad-output"})
"""Causes that are read off the numbers. Where samples disagree about them, none explains all."""


def merged(failures: list[Failure]) -> tuple[Failure, ...]:
    """One failure for each thing that is wrong, however many samples, dtypes and layouts show it."""
    groups: dict[tuple[Any, ...], list[Failure]] = {}
    for failure in failures:
        guessed = failure.cause in GUESSED
        key = (failure.check, failure.input, "guessed" if guessed else failure.cause, failure.where)
        groups.setdefault(key, []).append(failure)
    return tuple(_one(group) for group in groups.values())


def _one(group: list[Failure]) -> Failure:
    first = group[0]
    if len(group) == 1:
        return first
    causes = sorted({failure.cause for failure in group})
    evidence = {**first.evidence, "seen": f"in {len(group)} runs, the first of them shown"}
    if len(causes) == 1:
        return replace(first, evidence=evidence)
    return replace(first, cause=UNKNOWN, evidence={**evidence, "looks like": ", ".join(causes)})


FOLLOWS = ("forward_mode", "second_order")
"""Properties of what is derived from the gradients: a wrong gradient makes them wrong too."""


def referred(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes, where each failure that an earlier one explains names it.

    Args:
        outcomes: In the order in which a reader sees them.
    """
    seen: dict[tuple[str, str], str] = {}
    answers: list[Outcome] = []
    for outcome in outcomes:
        answers.append(replace(outcome, failures=tuple(_referred(f, seen) for f in outcome.failures)))
        for failure in outcome.failures:
            seen.setdefault((failure.cause, failure.message), failure.check)
            if failure.check == "gradient" and failure.input:
                seen.setdefault(("gradient", failure.input), failure.check)
    return answers


def _referred(failure: Failure, seen: Mapping[tuple[str, str], str]) -> Failure:
    earlier = seen.get((failure.cause, failure.message))
    if earlier is None and failure.check in FOLLOWS and failure.input:
        earlier = seen.get(("gradient", failure.input))
    return replace(failure, follows=earlier if earlier != failure.check else None)
