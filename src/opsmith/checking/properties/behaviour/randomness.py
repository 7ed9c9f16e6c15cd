"""Randomness: an operator draws random numbers if and only if it declares so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.property import Findings, Note, Property
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, each_run
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import (
    is_state,
    moved_since,
    random_states_restored,
    seed_torch,
    torch_state,
    torch_state_restored,
)
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.core.call_arguments import tensors_in

NAME = "randomness"


FOREIGN_STATE = "state"
"""Evidence of random numbers from a state that is not torch's: the name of the state."""


def run(subject: Subject) -> Findings:
    """Compare the declaration with the random operations of the reference and the global random states."""
    drew = False

    def check(run: Run) -> Findings:
        nonlocal drew
        subject, sample = run.subject, run.sample
        draws = [name for name, own_generator in drawing_operations(subject, sample) if not own_generator]
        moved = _states_moved(subject, sample)
        if draws and "torch" not in moved and _same_from_each_seed(subject, sample)[0]:
            draws = []  # in a region that keeps torch's state and uses its own seed
        drew = drew or bool(draws) or "torch" in moved
        # An operator that sets the random state changes it too, which `effects` reports.
        if not subject.specification.random and (draws or "torch" in moved) and not seeds(subject, sample):
            yield _of_a_class(run) if subject.kind.applied else _undeclared(run, draws)
        for name in moved:
            if name != "torch":
                message = (
                    f"{subject.name} draws from the global state of {name}, which "
                    "`torch.manual_seed` does not set and checkpointing does not restore: draw with "
                    "torch, or take a seed as an argument"
                )
                yield run.failure(None, "nondeterministic", message, evidence={FOREIGN_STATE: name})

    found = [*each_run(NAME, check, subject)]
    yield from found
    raised = any(isinstance(finding, Failure) and finding.cause == "raises" for finding in found)
    if subject.specification.random and not drew and not raised:
        message = (
            "the operator is declared `random=True`, but it drew from torch's random state in no "
            "sample. torch merges and recomputes random operators less often: leave `random=True` "
            "out, or add a sample that draws"
        )
        yield Failure(NAME, None, "not-exercised", message, subject.specification.where)


def _states_moved(subject: Subject, sample: Sample) -> list[str]:
    """Names of the global random states that a call of the operator changes; they are restored."""
    with random_states_restored() as before:
        with torch.no_grad():
            subject.called(*sample.arguments(sample.at()))
        with Overlooking():  # for example, it refuses a gradient by one of them
            subject.called_with_gradients(sample)
        return moved_since(before)


def _undeclared(run: Run, draws: list[str]) -> Failure:
    by = f"by `{'`, `'.join(dict.fromkeys(draws))}`" if draws else "somewhere in its kernel"
    declared = run.subject.specification.origin.declares_random
    message = (
        f"{run.subject.name} draws from torch's random state ({by}) and does not declare it: "
        "compiled code may merge two calls into one, and a backward that runs the reference again "
        f"draws other numbers. Declare it with `{declared}`, or take a seed or a `torch.Generator` "
        "as an argument"
    )
    return run.failure(None, "nondeterministic", message, evidence={"draws": draws})


def _of_a_class(run: Run) -> Failure | Note:
    """Check a class that draws, but cannot declare it: its backward must use the forward's random numbers."""
    with torch_state_restored():
        call = run.call()
        after_forward = torch_state()
        call.backward()
        drew = bool(run.argnums) and not is_state(after_forward)
    if not drew:
        return Note(
            "the forward draws from torch's random state, and every run of this check starts from the same "
            'state; declare it by `opsmith.adopt(..., kind="stochastic")`'
        )
    message = (
        f"the backward of {run.subject.name} draws from torch's random state, as its forward does, "
        "but gets other numbers: save the numbers that the forward drew, and use them"
    )
    return run.failure(None, "nondeterministic", message, run.subject.specification.where_of("gradient"))


RANDOMNESS = Property(
    NAME,
    "an operator draws random numbers if and only if it declares them",
    run,
    traits=("first", "compares-no-runs", "about-results"),
)


SEEDS = (11, 12)


def seeds(subject: Subject, sample: Sample) -> bool:
    """True if torch's random state after a call does not depend on the state before."""
    return subject.once("seeds", sample, lambda: _same_from_each_seed(subject, sample)[1])


def _same_from_each_seed(subject: Subject, sample: Sample) -> tuple[bool, bool]:
    """True if a call from two random states has the same results; and True if it leaves the same state."""
    runs: list[tuple[list[Tensor], list[Tensor]]] = []
    for seed in SEEDS:
        results: list[Tensor] = []
        with torch_state_restored():
            seed_torch(seed)
            args, kwargs = sample.arguments(sample.at())
            with Overlooking():  # the properties report its exceptions
                results = tensors_in([subject.called(args, kwargs)])
            runs.append((results, torch_state()))
    (results, state), (others, other) = runs
    return _alike(results, others), _alike(state, other)


def _alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    equal = [torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(one, other, strict=False)]
    return len(one) == len(other) > 0 and all(equal)
