"""Steady runs: conditions under which all runs of an operator agree, though it draws or writes undeclared.

Every forward and every backward begins with the same random states, and a buffer, such as running statistics,
is a fresh copy in each call. Then a check also finds faults other than the reported one.
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
"""Maximum number of samples on which the conditions are tried."""


DIFFERS = "differs"
"""Evidence of two runs that differ: `result`, or `gradient` if only the gradients differ."""

DERIVED = "derived inputs alone"
"""Evidence of runs that differ only on derived inputs: the positions of these among the samples."""

CHANGED = "changed"
"""Evidence of a call that changes a value that is no argument: the name of the value."""


def is_unsteady(failure: Failure) -> bool:
    """True if, by a failure, two runs may give different numbers on the author's samples."""
    return _differs(failure) and DERIVED not in failure.evidence


def _differs(failure: Failure) -> bool:
    # Results that share memory, which `effects` reports, may be equal; `state` compares them.
    shared = failure.property == "effects" and failure.cause == "stale-state"
    return CAUSES[failure.cause].unsteady and not shared and THROUGH_APPLY not in failure.evidence


def unsteady_inputs(failures: Sequence[Failure]) -> frozenset[int]:
    """Positions of the derived inputs on which runs differ, though not on others, by the failures so far."""
    shown = [str(each.evidence[DERIVED]) for each in failures if DERIVED in each.evidence and _differs(each)]
    return frozenset(int(position) for each in shown for position in each.split(", "))


def steady_conditions(subject: Subject, failures: Sequence[Failure]) -> SteadyRuns | None:
    """The conditions that may make runs agree, by the failures so far; None if there are none."""
    unsteady = [each for each in failures if is_unsteady(each)]
    draws = any(each.property == "randomness" for each in unsteady)
    written = {each.input for each in unsteady if each.cause == "mutates-input"}
    changed = [str(each.evidence[CHANGED]) for each in failures if CHANGED in each.evidence]
    keeps = bool(changed) or any(each.cause == "stale-state" for each in unsteady)
    known = {"mutates-input", *(["nondeterministic"] if draws or keeps else [])}
    known.update(["stale-state"] if keeps else [])
    differing = [each.evidence.get(DIFFERS) for each in unsteady if each.property == "determinism"]
    own = bool(differing) and "result" not in differing
    # If only the backward draws, its gradients are arbitrary and cannot be compared.
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
    """True if all runs agree under the conditions of a subject, tried on its first samples."""
    with random_states_restored(), Overlooking():
        few = subject.samples[:SAMPLES]
        return all(_is_steady(run) for each in few for run in Run.of(subject, each))
    return False


def _is_steady(run: Run) -> bool:
    """True if all runs agree, and no gradient flows to a buffer."""
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
