"""Randomness: an operator that draws declares it, and one that declares it draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from opsmith.checking.calls import differentiated
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.autodiff import differentiate
from opsmith.checking.property import Findings, Note, Property, each_sample
from opsmith.checking.report import Failure
from opsmith.checking.run import Run
from opsmith.checking.samples.grad_outputs import contiguous_grad_outputs
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.side_effects.random_states import (
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
"""Evidence of a draw from a random state that is not torch's: its name."""


def run(subject: Subject) -> Findings:
    """Compare the declaration with the random operations of the reference and the global random states."""
    drew = False

    def check_sample(subject: Subject, sample: Sample) -> Findings:
        nonlocal drew
        draws = [name for name, own_generator in drawing_operations(subject, sample) if not own_generator]
        moved = _states_moved(subject, sample)
        if draws and "torch" not in moved and _same_from_any_state(subject, sample):
            draws = []  # in a region that keeps torch's state, from a seed of its own
        drew = drew or bool(draws) or "torch" in moved
        # An operator that sets the random state changes it too, which `effects` reports.
        if not subject.specification.random and (draws or "torch" in moved) and not seeds(subject, sample):
            applied = subject.kind.applied
            yield _of_a_class(subject, sample) if applied else _undeclared(subject, sample, draws)
        for name in moved:
            if name != "torch":
                yield _foreign(subject, sample, name)

    raised = False
    for finding in each_sample(NAME, check_sample, subject):
        raised = raised or (isinstance(finding, Failure) and finding.cause == "raises")
        yield finding
    if subject.specification.random and not drew and not raised:
        message = (
            "it is declared `random=True` and drew from torch's random state in no sample; torch merges and "
            "recomputes random operators less freely: leave `random=True` out, or add a sample that draws"
        )
        yield Failure(NAME, None, "not-exercised", message, subject.specification.where)


def _states_moved(subject: Subject, sample: Sample) -> list[str]:
    """Names of the global random states that a call of the operator changes; they are restored."""
    with random_states_restored() as before:
        with torch.no_grad():
            subject.called(*sample.arguments(sample.at()))
        with Overlooking():  # as where it refuses a gradient by one of them
            subject.called_with_gradients(sample)
        return moved_since(before)


def _failure(subject: Subject, sample: Sample, message: str, where: str = "", **evidence: Any) -> Failure:
    shown = {"sample": str(sample), **evidence}
    return Failure(NAME, None, "nondeterministic", message, where or subject.specification.where, shown)


def _undeclared(subject: Subject, sample: Sample, draws: list[str]) -> Failure:
    by = f"by `{'`, `'.join(dict.fromkeys(draws))}`" if draws else "somewhere in its kernel"
    declared = subject.specification.origin.declares_random
    message = (
        f"{subject.name} draws from torch's random state ({by}) and does not say so: compiled code "
        "may merge two calls into one, and a backward that runs the reference again draws other numbers. "
        f"Declare it with `{declared}`, or give it a seed or a `torch.Generator` as an argument"
    )
    return _failure(subject, sample, message, draws=draws)


def _of_a_class(subject: Subject, sample: Sample) -> Failure | Note:
    """Check a class that draws, which it cannot declare: its backward must use the numbers of the forward."""
    argnums = differentiated(subject, sample).argnums
    with torch_state_restored(), without_warnings():
        call = Run(subject, sample, by=argnums).call()
        grads = contiguous_grad_outputs(subject, sample, call.results).grads
        after_forward = torch_state()
        differentiate(call.results, [call.leaves[argnum] for argnum in argnums], grads)
        drew = bool(argnums) and not is_state(after_forward)
    if not drew:
        return Note(
            "its forward draws from torch's random state, and every run here starts from the same one; "
            '`opsmith.adopt(..., kind="stochastic")` declares it'
        )
    message = (
        f"the backward of {subject.name} draws from torch's random state, as its forward does, and gets "
        "other numbers: save what the forward drew, and use that"
    )
    return _failure(subject, sample, message, subject.specification.where_of("gradient"))


def _foreign(subject: Subject, sample: Sample, name: str) -> Failure:
    message = (
        f"{subject.name} draws from the global state of {name}, which `torch.manual_seed` does not "
        "reach and checkpointing does not restore: draw with torch, or give it a seed as an argument"
    )
    return _failure(subject, sample, message, **{FOREIGN_STATE: name})


RANDOMNESS = Property(
    NAME,
    "randomness is declared, and what is declared random draws",
    run,
    traits=("first", "compares-no-runs", "about-results"),
)


SEEDS = (11, 12)


def seeds(subject: Subject, sample: Sample) -> bool:
    """True if torch's random state after a call does not depend on the state before."""
    return subject.once(
        "seeds", sample, lambda: _alike(state for _, state in _from_each_seed(subject, sample))
    )


def _same_from_any_state(subject: Subject, sample: Sample) -> bool:
    """True if the results are the same bits from two random states."""
    return _alike(results for results, _ in _from_each_seed(subject, sample))


def _alike(runs: Iterable[list[torch.Tensor]]) -> bool:
    first, second = runs
    return len(first) == len(second) > 0 and all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(first, second, strict=True)
    )


def _from_each_seed(
    subject: Subject, sample: Sample
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Results of a call from each of two random states, none where it raises, and the state after it."""
    for seed in SEEDS:
        results: list[torch.Tensor] = []
        with torch_state_restored():
            seed_torch(seed)
            args, kwargs = sample.arguments(sample.at())
            with Overlooking():  # the properties report what it raises
                results = tensors_in([subject.called(args, kwargs)])
            yield results, torch_state()
