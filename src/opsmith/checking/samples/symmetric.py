"""Symmetric matrices among the samples: detect inputs that an operator reads in one triangle alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.generate_like import is_symmetric


def among_symmetric(subject: Subject) -> Subject:
    """Return the subject with the symmetric inputs marked that it reads in one triangle alone.

    Args:
        subject: The checked operator.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> among_symmetric(subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])).symmetric
        frozenset()
    """
    labels = set[str]()
    if not subject.draws:
        every = [_of_one_triangle(subject, sample) for sample in subject.samples]
        labels = set.intersection(*every)
    return replace(subject, symmetric=frozenset(labels)) if labels else subject


def symmetric_remarks(subject: Subject) -> tuple[str, ...]:
    """Return the remark for a report."""
    if not subject.symmetric:
        return ()
    names = ", ".join(f"`{label}`" for label in sorted(subject.symmetric))
    return (
        f"derivatives by {names} are those among symmetric matrices: every sample has one there, of which "
        "one triangle alone is read",
    )


def _of_one_triangle(subject: Subject, sample: Sample) -> set[str]:
    """Return the labels of a sample's symmetric matrices that are read in one triangle alone."""
    return {
        sample.labels[argnum]
        for argnum in sample.inexact
        if is_symmetric(sample.flat[argnum]) and _reads_one(subject, sample, argnum)
    }


def _reads_one(subject: Subject, sample: Sample, argnum: int) -> bool:
    wide = sample.in_double()

    def results(value: Tensor) -> list[Any]:
        flat = [value if at == argnum else each for at, each in enumerate(wide)]
        return subject.reference(sample, flat)

    # Suppressed: if it raises for a matrix that is not symmetric, it reads all of it.
    with Overlooking(), torch.no_grad():
        matrix = wide[argnum]
        whole = results(matrix)
        return _same_results(whole, results(matrix + matrix.triu(1))) or _same_results(
            whole, results(matrix + matrix.tril(-1))
        )
    return False


def _same_results(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one is other
        for one, other in zip(some, others, strict=True)
    )
