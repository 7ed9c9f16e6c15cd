"""Domain of an operator: what holds in every sample of the author holds in derived inputs, too.

It is declared nowhere, and known from the samples alone. A rule says how two arguments go together, and
restores that where a derived input has broken it; and the reference is asked what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.core.generate_like import WHOLE, is_symmetric

FEWEST = 3
"""Fewest elements that show a rule: with two, chance does it."""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Relation:
    """One way in which two tensors go together.

    Args:
        restored: The pair that has it in place of a given one, along a dimension of the first tensor; None
            for a pair that cannot have it.
        is_shown: True if a pair that has it does not have it by chance.
        follows: True if the second tensor follows from the first.
        by_size: True if it is about a size of the first tensor, and is restored where this changes.
    """

    restored: Callable[[Tensor, Tensor, int], Pair | None]
    is_shown: Callable[[Tensor, Tensor, int], bool]
    follows: bool = False
    by_size: bool = False


def _derived(derive: Callable[[Tensor, int], Tensor]) -> Relation:
    """The relation of a tensor to the integers that are computed from it."""

    def restored(source: Tensor, target: Tensor, dim: int) -> Pair | None:
        if target.dtype not in WHOLE or source.dtype == torch.bool or source.is_complex():
            return None
        made = derive(source.detach(), dim).to(target.device, target.dtype)
        return (source, made) if made.shape == target.shape else None

    def is_shown(source: Tensor, target: Tensor, dim: int) -> bool:
        """True if the tensor is long enough, and not what follows from 0, 1, 2, ... as well."""
        plain = derive(torch.arange(source.shape[dim]), -1).to(target.device, target.dtype)
        moved = target.movedim(dim, -1)
        return source.shape[dim] >= FEWEST and not torch.equal(moved, plain.expand(moved.shape))

    return Relation(restored, is_shown, follows=True)


def _ordered(low: Tensor, high: Tensor, dim: int) -> Pair | None:
    alike = (low.shape, low.dtype, low.device) == (high.shape, high.dtype, high.device)
    if not alike or not low.is_floating_point():
        return None
    return low.detach().minimum(high.detach()), low.detach().maximum(high.detach())


def _below_size(table: Tensor, index: Tensor, dim: int) -> Pair | None:
    size = table.shape[dim]
    if not index.numel() or not size:
        return table, index
    if index.dtype not in WHOLE or int(index.min()) < 0:
        return None
    return table, index if int(index.max()) < size else index % size


def _ending_at_size(table: Tensor, offsets: Tensor, dim: int) -> Pair | None:
    if offsets.dtype not in WHOLE or offsets.dim() != 1 or len(offsets) < 2 or int(offsets.min()) < 0:
        return None
    made = offsets.clamp(max=table.shape[dim]).sort().values
    made[-1] = table.shape[dim]
    return table, made


RELATIONS = (
    Relation(_ordered, lambda low, high, dim: low.numel() >= FEWEST and bool((low < high).all())),
    Relation(_below_size, lambda table, index, dim: index.numel() > 0, by_size=True),
    Relation(_ending_at_size, lambda table, offsets, dim: True, by_size=True),
    _derived(lambda source, dim: source.argsort(dim=dim, stable=True)),
    _derived(lambda source, dim: source.diff(dim=dim)),
)
"""Bounds in order, indices below a size, offsets that end at one; the order of the elements, which of a
permutation is its inverse; and the counts between offsets."""


@dataclass(frozen=True)
class Rule:
    """A relation of two arguments that holds in every sample.

    Args:
        relation: The relation.
        source: Label of the first argument.
        target: Label of the second one.
        dim: The dimension of the first.
        rank: The number of its dimensions.
    """

    relation: Relation
    source: str
    target: str
    dim: int
    rank: int

    def holds(self, values: Mapping[str, Any]) -> bool:
        """True if the arguments have the relation, or are not both tensors of these ranks."""
        pair = self._pair(values)
        restored = None if pair is None else self.relation.restored(*pair, self.dim)
        return pair is None or (restored is not None and all(map(torch.equal, pair, restored)))

    def restore(self, given: Mapping[str, Any], changed: dict[str, Any]) -> None:
        """Restore the relation in arguments that were changed."""
        now, had = self._pair(changed), self._pair(given)
        kept = now is not None and had is not None and now[0].shape[self.dim] == had[0].shape[self.dim]
        if now is None or (self.relation.by_size and kept):
            return
        for label, value in zip(
            (self.source, self.target), self.relation.restored(*now, self.dim) or now, strict=True
        ):
            if not torch.equal(changed[label], value):
                changed[label] = value

    def _pair(self, values: Mapping[str, Any]) -> Pair | None:
        source, target = values.get(self.source), values.get(self.target)
        if not isinstance(source, Tensor) or not isinstance(target, Tensor) or source.dim() != self.rank:
            return None
        return source, target


def rules_of(subject: Subject) -> tuple[Rule, ...]:
    """The rules that hold in every sample of the author which has both arguments, and that one shows.

    Example:
        >>> import torch, opsmith
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> @opsmith.operator("demo::take")
        ... def take(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ...     return x[order]
        >>> order = torch.tensor([2, 0, 3, 1])
        >>> call = (torch.ones(4), order, order.argsort())
        >>> rules = rules_of(subject_of(take, [call], 0, EFFORTS["quick"]))
        >>> [rule.target for rule in rules if rule.relation.follows]
        ['inverse']
    """
    samples = [each for each in subject.samples if not each.origin]
    return subject.once("rules", samples[0], partial(_rules_of, samples)) if samples else ()


def _rules_of(samples: Sequence[Sample]) -> tuple[Rule, ...]:
    every = [dict(zip(each.labels, each.flat, strict=True)) for each in samples]
    found: list[Rule] = []
    following: set[str] = set()
    for rule in (rule for values in every for rule in _shown(values)):
        # Of a permutation and its inverse, the later one follows, and not each from the other.
        again = rule in found or (rule.relation.follows and {rule.source, rule.target} & following)
        if not again and all(map(rule.holds, every)):
            found.append(rule)
            following |= {rule.target} if rule.relation.follows else set()
    return tuple(sorted(found, key=lambda rule: RELATIONS.index(rule.relation)))


def _shown(values: Mapping[str, Any]) -> Iterator[Rule]:
    """The rules that a sample shows."""
    tensors = {label: value for label, value in values.items() if isinstance(value, Tensor)}
    for relation, (source, one), (target, other) in product(RELATIONS, tensors.items(), tensors.items()):
        for dim in range(-1, -one.dim() - 1, -1) if source != target or relation.by_size else ():
            rule = Rule(relation, source, target, dim, one.dim())
            if rule.holds(values) and relation.is_shown(one, other, dim):
                yield rule


def restored(subject: Subject, sample: Sample, flat: Sequence[Any]) -> list[Any]:
    """The flat arguments of an input that was derived from a sample, with each rule restored."""
    given = dict(zip(sample.labels, sample.flat, strict=True))
    changed = dict(zip(sample.labels, flat, strict=True))
    for rule in rules_of(subject):
        rule.restore(given, changed)
    return list(changed.values())


def asked(
    subject: Subject, sample: Sample, changed: Mapping[int, Any], *, wide: bool = False
) -> list[Tensor] | None:
    """The results of the reference with some arguments changed; None where it raises.

    Args:
        changed: Other values, by position.
        wide: True for arguments in float64.
    """
    flat = sample.in_double() if wide else sample.at()
    for argnum, value in changed.items():
        flat[argnum] = value.clone()
    with Overlooking(), torch.no_grad():  # the properties report what it raises for a sample
        return tensors_in(list(subject.reference(sample, flat)))
    return None


def are_same(one: Sequence[Any] | None, other: Sequence[Any] | None) -> bool:
    """True for tensors of the same numbers; False where there is none, as where the reference has raised."""
    if one is None or other is None or len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def among_symmetric(subject: Subject) -> Subject:
    """The subject with the symmetric inputs marked that it reads in one triangle alone."""
    if subject.draws:
        return subject
    every = [
        {
            sample.labels[argnum]
            for argnum in sample.inexact
            if is_symmetric(sample.flat[argnum]) and _reads_one_triangle(subject, sample, argnum)
        }
        for sample in subject.samples
    ]
    labels = set.intersection(*every)
    return replace(subject, symmetric=frozenset(labels)) if labels else subject


def symmetric_remarks(subject: Subject) -> tuple[str, ...]:
    """The remark for a report."""
    if not subject.symmetric:
        return ()
    names = ", ".join(f"`{label}`" for label in sorted(subject.symmetric))
    return (
        f"derivatives by {names} are those among symmetric matrices: every sample has one there, of which "
        "one triangle alone is read",
    )


def _reads_one_triangle(subject: Subject, sample: Sample, argnum: int) -> bool:
    """True if one triangle may change; where it raises for a matrix that is not symmetric, it reads all."""
    matrix = sample.in_double()[argnum]
    whole = asked(subject, sample, {}, wide=True)
    others = (matrix + matrix.triu(1), matrix + matrix.tril(-1))
    return any(are_same(whole, asked(subject, sample, {argnum: other}, wide=True)) for other in others)
