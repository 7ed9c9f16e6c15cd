"""Linked values: an integer tensor that follows from another argument, as the inverse of a permutation does.

What holds in every sample of the author holds in derived inputs, too: the domain of an operator is known from
its samples alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.samples.generate_like import WHOLE
from opsmith.checking.samples.sample import Sample

FEWEST = 3
"""Fewest elements along a dimension that show a link: with two, chance does it."""


@dataclass(frozen=True)
class Derivation:
    """One way in which a tensor follows from another one.

    Args:
        derive: The tensor that follows from a tensor along a dimension.
        backwards: True if it is also looked for from a later argument to an earlier one.
    """

    derive: Callable[[Tensor, int], Tensor]
    backwards: bool


DERIVATIONS = (
    Derivation(lambda source, dim: source.argsort(dim=dim, stable=True), False),
    Derivation(lambda source, dim: source.diff(dim=dim), True),
)
"""The order of the elements, which of a permutation is its inverse; and the counts between offsets."""


@dataclass(frozen=True)
class LinkedValues:
    """One tensor that follows from another one in every sample.

    Args:
        source: Label of the argument that it follows from.
        target: Label of the argument that follows.
        derivation: The way.
        dim: The dimension, counted from the end.
    """

    source: str
    target: str
    derivation: Derivation
    dim: int

    def derived(self, labels: Sequence[str], flat: Sequence[Any]) -> tuple[int, Tensor] | None:
        """Position and right value of the target; None where this call has not both tensors."""
        if self.source not in labels or self.target not in labels:
            return None
        position = labels.index(self.target)
        source, target = flat[labels.index(self.source)], flat[position]
        if not isinstance(source, Tensor) or not isinstance(target, Tensor) or source.dim() < -self.dim:
            return None
        made = self.derivation.derive(source.detach(), self.dim).to(target.device, target.dtype)
        return (position, made) if made.shape == target.shape else None


def links_of(samples: Sequence[Sample]) -> list[LinkedValues]:
    """The links that hold in every sample which has both arguments, and that one shows.

    Example:
        >>> import torch, opsmith
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> @opsmith.operator("demo::take")
        ... def take(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ...     return x[order]
        >>> order = torch.tensor([2, 0, 3, 1])
        >>> call = (torch.ones(4), order, order.argsort())
        >>> [each.target for each in links_of(subject_of(take, [call], 0, EFFORTS["quick"]).samples)]
        ['inverse']
    """
    found: dict[str, LinkedValues] = {}
    for sample in samples:
        for link in _candidates(sample):
            if link.target not in found and all(_holds(link, each) for each in samples):
                found[link.target] = link
    return [*found.values()]


def _candidates(sample: Sample) -> Iterator[LinkedValues]:
    """Links that a sample shows."""
    for source, given in enumerate(sample.flat):
        for target, follows in enumerate(sample.flat):
            if source == target or not isinstance(given, Tensor) or not isinstance(follows, Tensor):
                continue
            if follows.dtype not in WHOLE or given.dtype == torch.bool or given.is_complex():
                continue
            for derivation in DERIVATIONS:
                for dim in range(-1, -given.dim() - 1, -1):
                    link = LinkedValues(sample.labels[source], sample.labels[target], derivation, dim)
                    ordered = source < target or derivation.backwards
                    if ordered and _shows(link, given, follows) and _holds(link, sample):
                        yield link


def _shows(link: LinkedValues, given: Tensor, follows: Tensor) -> bool:
    """True if a tensor is long enough, and not what follows from 0, 1, 2, ... as well."""
    if follows.dim() != given.dim() or given.shape[link.dim] < FEWEST:
        return False
    counted = torch.arange(given.shape[link.dim])
    plain = link.derivation.derive(counted, -1).to(follows.device, follows.dtype)
    moved = follows.movedim(link.dim, -1)
    return len(plain) == moved.shape[-1] and not torch.equal(moved, plain.expand(moved.shape))


def _holds(link: LinkedValues, sample: Sample) -> bool:
    found = link.derived(sample.labels, sample.flat)
    if found is None:
        return not {link.source, link.target} <= {*sample.labels}
    return torch.equal(sample.flat[found[0]], found[1])


def relinked(links: Sequence[LinkedValues], labels: Sequence[str], flat: Sequence[Any]) -> list[Any]:
    """Return the flat arguments of a derived call, with each target made to follow from its source."""
    values = list(flat)
    for link in links:
        found = link.derived(labels, values)
        if found is not None:
            values[found[0]] = found[1]
    return values
