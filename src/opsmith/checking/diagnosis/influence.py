"""What comes in for some elements has no part in it: that for the others than its own, or for its own.

A gradient is linear in what comes in, so that each element of it has a weight for each element that comes in.
Both tables of weights, of what came and of the right one, are taken an element at a time. Where one is the
other with some weights missing, and these are told by the indices on both sides, a term is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.comparable import peak, wide
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen

MOST = 32
"""Elements of what comes in that are looked at one at a time, at most."""

LARGEST = 1 << 18
"""Weights in a table, at most."""

ROUGH = 1e-2
"""Beside the largest weight, how far one may be off to be worth a closer look."""

FEW = 3
"""Of fewer weights that are missing, or there, it is chance which indices they have."""


def influence(seen: Seen) -> Iterator[Found]:
    """Weights that are missing, told by the indices of what comes in beside its own, on every pair."""
    names = [name for name, grad in seen.observation.grads.items() if grad is not None]
    for name in names:
        tables = []
        for pair in seen.pairs:
            table = _table(pair, name)
            if table is None or not table.explains:
                break
            tables.append(table)
        if len(tables) < len(seen.pairs):
            continue
        counts = [sum(int(each.sum()) for each in some) for some in _kinds(tables)]
        if min(counts) < FEW:
            continue
        of = f" of `{name}`" if len(names) > 1 else " of the result"
        for words, related in _relations(tables[0], of):
            if all(_told(table, related) for table in tables):
                missing, there = counts
                evidence = {"weights missing": f"{missing} of {missing + there}"}
                yield Found("missing-term", words, evidence)
                return


@dataclass(frozen=True)
class Table:
    """The weight of each element that comes in, in each element of a gradient.

    Args:
        pair: What came and what is right, as [elements that come in, *shape of the gradient].
        at: Indices of the elements that come in, as [elements, dimensions].
        shape: Shape of what comes in.
    """

    pair: Pair
    at: Tensor
    shape: torch.Size

    @cached_property
    def there(self) -> Tensor:
        """Weights that are the right ones, and none."""
        return self.pair.agrees(self.pair.right) & ~self._none

    @cached_property
    def missing(self) -> Tensor:
        """Weights that are zero, where the right ones are not."""
        return self._none & ~self.pair.agrees(self.pair.right)

    @cached_property
    def explains(self) -> bool:
        """Whether every weight is right or missing."""
        right = self.pair.right
        finite = bool(right.isfinite().all() and self.pair.mine.isfinite().all())
        return finite and bool((self._none | self.pair.agrees(right)).all())

    @cached_property
    def _none(self) -> Tensor:
        return self.pair.agrees(torch.zeros_like(self.pair.right))

    def outer(self, dim: int) -> Tensor:
        """The index of what comes in along a dimension, beside the table."""
        return self.at[:, dim].reshape(-1, *[1] * (self.pair.right.dim() - 1))

    def inner(self, dim: int) -> Tensor:
        """The index in the gradient along a dimension, beside the table."""
        shape = self.pair.right.shape[1:]
        return torch.arange(shape[dim]).reshape(-1, *[1] * (len(shape) - dim - 1))[None]


def _table(pair: Pair, name: str) -> Table | None:
    backward, right = pair.observation.backward, pair.observation.right
    grad = pair.observation.grads.get(name)
    if backward is None or right is None or grad is None or not pair.same_shape or not pair.right.dim():
        return None
    if not grad.dim() or grad.is_complex() or pair.right.is_complex():
        return None
    count = min(MOST, LARGEST // max(pair.right.numel(), 1))
    chosen = torch.randperm(grad.numel(), generator=torch.Generator().manual_seed(0))[:count]
    if not len(chosen):
        return None
    weights: list[tuple[Tensor, Tensor]] = []
    for at in chosen.tolist():
        one = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        one.view(-1)[at] = 1
        grads = [
            one if each == name else None if other is None else torch.zeros_like(other)
            for each, other in pair.observation.grads.items()
        ]
        got, expected = backward(grads), right(grads)
        got = torch.zeros_like(expected) if got is None else got
        if got.shape != expected.shape or not _either(wide(got), wide(expected)):
            return None
        weights.append((got.detach().cpu(), expected.detach().cpu()))
    mine, theirs = (torch.stack(each) for each in zip(*weights, strict=True))
    at_each = torch.stack(torch.unravel_index(chosen, grad.shape), -1)
    return Table(Pair(Observation(mine, theirs)), at_each, grad.shape)


def _either(got: Tensor, expected: Tensor) -> bool:
    """Whether each weight is roughly the right one or none, so that it is worth while to look at others."""
    off = torch.minimum(got.abs(), (got - expected).abs())
    return bool(off.isfinite().all()) and peak(off) <= ROUGH * max(peak(got), peak(expected))


def _kinds(tables: list[Table]) -> Iterator[list[Tensor]]:
    yield [table.missing for table in tables]
    yield [table.there for table in tables]


Related = Callable[[Table], Tensor]
"""Which weights of a table a relation of indices holds of."""

RELATIONS = MappingProxyType(
    {
        "the same as": torch.eq,
        "another than": torch.ne,
        "less than": torch.lt,
        "greater than": torch.gt,
        "at most": torch.le,
        "at least": torch.ge,
    }
)


def _told(table: Table, related: Related) -> bool:
    """Whether a relation holds of all that is missing, and of nothing that is there."""
    held = related(table).expand(table.pair.right.shape)
    return bool(held[table.missing].all()) and not bool(held[table.there].any())


def _relations(table: Table, of: str) -> Iterator[tuple[str, Related]]:
    """Relations between the index of what comes in and that in the gradient, the simplest first."""
    outer, inner = table.shape, table.pair.right.shape[1:]
    if outer == inner:
        others = f"what comes in for the others{_along(table)} is missing"
        yield f"it has only what comes in for the same element{of}; {others}", _of_others
        words = f"it lacks what comes in for the same element{of}, and has what comes in for the others"
        yield words, _of_the_same
    pairs = [(p, q) for p in range(len(outer)) for q in range(len(inner))]
    for p, q in sorted(pairs, key=lambda each: each[0] != each[1]):
        index = f"the index of dimension {p}{of}"
        for word, relation in RELATIONS.items():
            words = f"it lacks what comes in where {index} is {word} its own of dimension {q}"
            yield words, partial(_related, p=p, q=q, relation=relation)
        for step in _steps(table, p, q):
            words = f"it lacks what comes in {abs(step)} {'after' if step > 0 else 'before'} its own place"
            yield f"{words}, of dimension {p}{of} beside dimension {q}", partial(_apart, p=p, q=q, step=step)


def _related(table: Table, p: int, q: int, relation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return relation(table.outer(p), table.inner(q))


def _apart(table: Table, p: int, q: int, step: int) -> Tensor:
    return table.outer(p) - table.inner(q) == step


def _of_others(table: Table) -> Tensor:
    return ~_of_the_same(table)


def _of_the_same(table: Table) -> Tensor:
    held = torch.ones(table.pair.right.shape, dtype=torch.bool)
    for dim in range(len(table.shape)):
        held &= table.outer(dim) == table.inner(dim)
    return held


def _along(table: Table) -> str:
    """The dimensions along which what is missing lies, unless these are all."""
    dims = len(table.shape)
    apart = [
        dim
        for dim in range(dims)
        if bool((table.outer(dim) != table.inner(dim)).expand(table.missing.shape)[table.missing].any())
    ]
    if len(apart) == dims:
        return ""
    return f" along dimension{'s' * (len(apart) > 1)} {' and '.join(map(str, apart))}"


def _steps(table: Table, p: int, q: int) -> list[int]:
    """By how much the indices of what is missing differ, if it is always the same."""
    apart = (table.outer(p) - table.inner(q)).expand(table.missing.shape)[table.missing].unique()
    return [int(apart)] if len(apart) == 1 and int(apart) else []
