"""Which of many samples a quick check looks at closely: those that are unlike the ones before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject

ENOUGH = 4
"""How many samples the properties in `BRIEF` look at in a quick check."""

BRIEF = frozenset(
    {"second_order", "forward_mode", "vmap", "determinism", "backward_again", "memory", "autocast"}
)
"""Properties that look at every sample in many ways, and seldom find in one what another does not show."""


def briefly(subject: Subject) -> Subject:
    """The same, in a quick check with no more samples than are enough.

    First come samples in which other arguments are tensors, or have other numbers of dimensions, or no
    elements; then the others in turn.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> len(briefly(subject_of(opsmith.ops.linear, None, 0, EFFORTS["quick"])).samples)
        4
    """
    if subject.effort.name != "quick" or len(subject.samples) <= ENOUGH:
        return subject
    kinds: dict[tuple[Any, ...], Sample] = {}
    for sample in subject.samples:
        kinds.setdefault(_kind(sample), sample)
    first = [*kinds.values()]
    chosen = _positions(
        [*first, *(each for each in subject.samples if each.position not in _positions(first))][:ENOUGH]
    )
    return replace(subject, samples=tuple(each for each in subject.samples if each.position in chosen))


def remarks(subject: Subject, ran: Iterable[str]) -> tuple[str, ...]:
    """What a report has to say of it.

    Args:
        subject: What is under check.
        ran: Names of the properties that ran.
    """
    few = len(briefly(subject).samples)
    names = ", ".join(f"`{name}`" for name in ran if name in BRIEF)
    if few == len(subject.samples) or not names:
        return ()
    return (f"{names} looked at {few} of the {len(subject.samples)} samples: the effort is `quick`",)


def _positions(samples: Sequence[Sample]) -> set[int]:
    return {sample.position for sample in samples}


def _kind(sample: Sample) -> tuple[Any, ...]:
    """What makes a sample unlike others: its tensors, their numbers of dimensions, and what is empty."""
    return tuple(
        (value.dim(), value.dtype, bool(value.numel())) if isinstance(value, Tensor) else type(value)
        for value in sample.flat
    )
