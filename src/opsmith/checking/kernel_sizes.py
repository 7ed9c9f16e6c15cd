"""Sizes at which kernels go wrong: larger than a tile, and one.

They cost little where results alone are looked at, and so they come on top of the other variations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from opsmith.checking.changes import LARGE_SIZES, Change, resized, varies
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.checking.symbols import sizes_of
from opsmith.checking.variations import refusal

FORMS = {"quick": 1, "default": 3, "thorough": 1000}
"""From so many of the author's samples they are derived, no two of which have the same dimensions."""

MOST_ELEMENTS = 20_000
"""No derived sample has more elements than this."""


def kernel_sizes(subject: Subject) -> tuple[Sample, ...]:
    """Samples of other sizes for the kernels that run here; none where there is no kernel.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subjects import subject_of
        >>> kernel_sizes(subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"]))
        ()
    """
    if not any(subject.kernels_on(device) for device in subject.devices):
        return ()
    own = authored(subject)
    found: list[Sample] = []
    for sample in forms(subject):
        for change in _changes(own, sample):
            made = change.sample(1 + max(each.position for each in (*subject.samples, *found)))
            if made.elements <= MOST_ELEMENTS and refusal(own, made, change) is None:
                found.append(made)
    return tuple(found)


def authored(subject: Subject) -> Subject:
    """The same with the author's own samples alone."""
    return replace(subject, samples=tuple(sample for sample in subject.samples if not sample.origin))


def forms(subject: Subject) -> list[Sample]:
    """Of the author's samples with elements one for each form of dimensions, as many as the effort goes to.

    Args:
        subject: What is under check.
    """
    found: dict[object, Sample] = {}
    for sample in authored(subject).samples:
        ranks = tuple(value.dim() if isinstance(value, Tensor) else None for value in sample.flat)
        if sample.elements:
            found.setdefault(ranks, sample)
    return [*found.values()][: FORMS[subject.effort.name]]


def _changes(subject: Subject, sample: Sample) -> Iterator[Change]:
    """All sizes that may vary larger than tiles are, together or each alone; then each alone at one."""
    sizes = sizes_of(subject, sample)
    names = [symbol.name for symbol in sizes.symbols if varies(subject, sizes, symbol)]
    generator = subject.generator()
    large = {name: LARGE_SIZES[at % len(LARGE_SIZES)] for at, name in enumerate(names)}
    together = [*resized(sizes, large, generator, most=MOST_ELEMENTS)] if names else []
    if together:
        yield from together
    else:
        for name, size in large.items():
            yield from resized(sizes, {name: size}, generator, most=MOST_ELEMENTS)
    for name in names:
        yield from resized(sizes, {name: 1}, generator)
