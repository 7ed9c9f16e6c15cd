"""Sample subset of a quick check: samples that differ most from one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject


def sample_subset(subject: Subject) -> Subject:
    """Return the subject with a subset of its samples, if the effort limits them.

    First come samples in which other arguments are tensors, or have other numbers of dimensions, or no
    elements; then the others in turn.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> len(sample_subset(subject_of(opsmith.ops.linear, None, 0, EFFORTS["quick"])).samples)
        4
    """
    enough = subject.effort.subset
    if len(subject.samples) <= enough:
        return subject
    kinds: dict[tuple[Any, ...], Sample] = {}
    for sample in subject.samples:
        kinds.setdefault(_kind(sample), sample)
    first = [*kinds.values()]
    chosen = _positions(
        [*first, *(each for each in subject.samples if each.position not in _positions(first))][:enough]
    )
    return replace(subject, samples=tuple(each for each in subject.samples if each.position in chosen))


def subset_remarks(subject: Subject, ran: Iterable[str]) -> tuple[str, ...]:
    """Return the remark for a report.

    Args:
        subject: The checked operator.
        ran: Names of the properties that ran on the subset.
    """
    few = len(sample_subset(subject).samples)
    names = ", ".join(f"`{name}`" for name in ran)
    if few == len(subject.samples) or not names:
        return ()
    return (f"{names} looked at {few} of the {len(subject.samples)} samples: the effort is `quick`",)


def _positions(samples: Sequence[Sample]) -> set[int]:
    return {sample.position for sample in samples}


def _kind(sample: Sample) -> tuple[Any, ...]:
    """Return what distinguishes samples: their tensors, ranks and dtypes, and those that are empty."""
    return tuple(
        (value.dim(), value.dtype, bool(value.numel())) if isinstance(value, Tensor) else type(value)
        for value in sample.flat
    )
