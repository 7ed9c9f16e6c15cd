"""Steady runs of an operator that draws undeclared, or writes into a buffer: every run gives the same.

Every forward and every backward begins with the same random states, and a buffer, such as running
statistics, is a fresh copy in each call. What is wrong beside the reported fault then shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from opsmith.checking.causes import CAUSES
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, differing
from opsmith.checking.side_effects.canaries import BYTES, fill_freed_memory
from opsmith.checking.side_effects.global_settings import random_states_restored
from opsmith.checking.subject import SteadyRuns, Subject
from opsmith.checking.subject_kinds import THROUGH_APPLY

SAMPLES = 3
"""Most samples on which it is tried."""


DIFFERS = "differs"
"""Evidence of two runs that differ: `result`, or `gradient` where the gradient alone does."""

DERIVED = "derived inputs alone"
"""Evidence of runs that differ on derived inputs alone: their numbers among the samples."""

CHANGED = "changed"
"""Evidence of a call that changes what it reaches without an argument: its name."""


def is_unsteady(failure: Failure) -> bool:
    """True if two runs may give different numbers for what a failure reports, on samples of the author's."""
    return _differs(failure) and DERIVED not in failure.evidence


def _differs(failure: Failure) -> bool:
    # Results that share memory, which `effects` reports, need not differ: `state` compares them.
    shared = failure.property == "effects" and failure.cause == "stale-state"
    return CAUSES[failure.cause].unsteady and not shared and THROUGH_APPLY not in failure.evidence


def unsteady_inputs(failures: Sequence[Failure]) -> frozenset[int]:
    """Positions of the derived inputs on which alone runs differ, by the failures so far."""
    shown = [str(each.evidence[DERIVED]) for each in failures if DERIVED in each.evidence and _differs(each)]
    return frozenset(int(position) for each in shown for position in each.split(", "))


def steady_conditions(subject: Subject, failures: Sequence[Failure]) -> SteadyRuns | None:
    """The conditions that may make runs the same, by the failures so far; None where nothing does."""
    unsteady = [each for each in failures if is_unsteady(each)]
    draws = any(each.property == "randomness" for each in unsteady)
    written = {each.input for each in unsteady if each.cause == "mutates-input"}
    changed = [str(each.evidence[CHANGED]) for each in failures if CHANGED in each.evidence]
    keeps = bool(changed) or any(each.cause == "stale-state" for each in unsteady)
    known = {"mutates-input", *(["nondeterministic"] if draws or keeps else [])}
    known.update(["stale-state"] if keeps else [])
    differing = [each.evidence.get(DIFFERS) for each in unsteady if each.property == "determinism"]
    own = bool(differing) and "result" not in differing
    # A backward that alone draws gives arbitrary numbers: no gradient can be compared.
    if own or None in written or not {each.cause for each in unsteady} <= known:
        return None
    return SteadyRuns(
        subject.seed,
        draws,
        frozenset(each for each in written if each is not None),
        subject.outside if keeps else None,
        tuple(dict.fromkeys(changed)),
    )


def are_steady(subject: Subject) -> bool:
    """True if all runs are the same under the conditions of a subject, tried on its first samples."""
    with random_states_restored(), Overlooking():
        few = subject.samples[:SAMPLES]
        return all(_is_steady(run) for each in few for run in Run.of(subject, each))
    return False


def _is_steady(run: Run) -> bool:
    """True if every run gives the same, and no gradient flows to a buffer."""
    first = run.values()
    for byte in BYTES:
        fill_freed_memory([*first.tensors, *run.sample.flat], byte)
        if differing(first.tensors, run.values().tensors):
            return False
    assert run.subject.steady is not None
    return all(
        gradient is None or not bool(gradient.any())
        for argnum, gradient in zip(run.argnums, first.gradients, strict=True)
        if run.sample.labels[argnum] in run.subject.steady.copied
    )
