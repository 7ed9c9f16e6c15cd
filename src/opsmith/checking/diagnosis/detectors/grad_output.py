"""How the gradient depends on the one that comes in: not at all, or not linearly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.precision import precision
from opsmith.checking.diagnosis.hypothesis import ROUNDINGS, Found, Pair, Seen
from opsmith.checking.diagnosis.observation import Grads, Observation
from opsmith.checking.numerics.compare import peak, wide
from opsmith.checking.samples import layouts

Backward = Callable[[Grads], Tensor | None]
"""From incoming gradients, one for each result, to the gradient of an input."""

UNIFORM: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "the same everywhere: that for the first element": lambda grad: grad.flatten()[0],
        "the same everywhere: that for the last element": lambda grad: grad.flatten()[-1],
        "the same everywhere: its mean": lambda grad: grad.mean(),
        "the same everywhere: its sum": lambda grad: grad.sum(),
        "the same in every row: that for the first": lambda grad: grad[:1],
        "the same in every column: that for the first": lambda grad: grad[..., :1],
        "of one sign: its size": lambda grad: grad.abs().to(grad.dtype),
    }
)
"""What a backward may take of an incoming gradient, in place of all of it."""

ROOM = 16.0
"""Of its own rounding, how much of a backward is no sign of its being non-linear."""


ROUGH = 0.6
"""And of the digits of an ill-conditioned one, which share of them says something."""


def incoming(seen: Seen) -> Iterator[Found]:
    """Whether it ignores what comes in; else whether it is linear in it; on all inputs."""
    if seen.observation.backward is None:
        return
    rounded = next(precision(seen), None) is not None  # rounding is not linear either
    for test in (ignores_grad,) if rounded else (ignores_grad, nonlinear):
        reasons = []
        for pair in seen.pairs:
            assert pair.observation.backward is not None
            reasons.append(test(pair.observation.backward, list(pair.observation.grads.values())))
            if reasons[-1] is None:
                break
        if all(reasons) and reasons[0] is not None:
            cause, reason = reasons[0]
            yield Found(cause, reason + _right_for_ones(seen, cause))
            return
    for words, take in UNIFORM.items():
        if seen.everywhere(partial(_as_if, take=take)):
            yield Found("ignores-grad-output", f"it takes what comes in to be {words}")
            return


def ignores_grad(backward: Backward, grads: Grads) -> tuple[str, str] | None:
    """The cause and the evidence in words, if a gradient does not depend on the incoming ones; else None.

    Args:
        backward: From incoming gradients to the gradient.
        grads: Incoming gradients to begin with.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0])
        >>> ignores_grad(lambda grads: 2 * x, [torch.tensor([0.3, -1.0])])
        ('ignores-grad-output', 'it stays as it is whatever comes in')
    """
    first = backward(grads)
    if first is None or not first.any():
        return None
    for others in (_doubled(grads), _others(grads, 1)):
        again = backward(others)
        if again is None or not _same(first, again):
            return None
    return "ignores-grad-output", "it stays as it is whatever comes in"


def nonlinear(backward: Backward, grads: Grads) -> tuple[str, str] | None:
    """The cause and the evidence in words, if a gradient is not linear in the incoming ones; else None.

    Rounding is not linear: what computes in a narrower dtype than it is given is found, too.

    Args:
        backward: From incoming gradients to the gradient.
        grads: Incoming gradients to begin with.

    Example:
        >>> import torch
        >>> nonlinear(lambda grads: grads[0] * grads[0], [torch.tensor([0.3, -1.0])])[0]
        'nonlinear-grad'
    """
    one, other = grads, _others(grads, 2)
    alone = [backward(each) for each in (one, other)]
    for a, b in ((2.0, 0.0), (-1.0, 0.0), (0.0, 0.0), (1.5, -0.75), (64.0, 1.0), (1 / 64, 0.0)):
        mixed = backward(_mixed(one, other, a, b))
        parts = [wide(_or_zeros(each, mixed)) for each in alone]
        if mixed is None:
            if peak(a * parts[0] + b * parts[1]) > 0:
                return "nonlinear-grad", _said(a, b, float("inf"))
            continue
        together = a * parts[0] + b * parts[1]
        size = max(peak(mixed), abs(a) * peak(parts[0]), abs(b) * peak(parts[1]))
        off = wide(mixed) - together
        if not bool(off.isfinite().all()):
            continue
        eps = torch.finfo(mixed.dtype).eps
        if peak(off) > max(ROOM * ROUNDINGS * eps, eps**ROUGH) * size:
            return "nonlinear-grad", _said(a, b, peak(off) / (size or 1.0))
    return None


def _said(a: float, b: float, off: float) -> str:
    if not a and not b:
        return "it is not zero where zeros come in, so it is not linear in what comes in"
    if not b:
        return f"it is not linear in what comes in: for {a:g} times as much it is not {a:g} times as large"
    return (
        "it is not linear in what comes in: "
        f"for {a:g} u {'+' if b > 0 else '-'} {abs(b):g} v it is not {a:g} times that of u "
        f"{'plus' if b > 0 else 'minus'} {abs(b):g} times that of v (off by {off:.1g})"
    )


def _as_if(pair: Pair, take: Callable[[Tensor], Tensor]) -> bool:
    """Whether it is right for an incoming gradient that is made uniform."""
    right, grads = pair.observation.right, list(pair.observation.grads.values())
    if right is None or not any(grad is not None and grad.numel() > 1 and grad.dim() for grad in grads):
        return False
    return pair.is_(wide(right([_made(grad, take) for grad in grads])))


def _made(grad: Tensor | None, take: Callable[[Tensor], Tensor]) -> Tensor | None:
    if grad is None or not grad.dim() or not grad.numel():
        return grad
    return take(grad).expand(grad.shape).clone()


def _right_for_ones(seen: Seen, cause: str) -> str:
    right, backward = seen.observation.right, seen.observation.backward
    if cause != "ignores-grad-output" or right is None or backward is None:
        return ""
    ones = [None if grad is None else torch.ones_like(grad) for grad in seen.observation.grads.values()]
    return ", and is right for ones alone" if seen.first.is_(wide(right(ones))) else ""


def _or_zeros(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    return torch.zeros(()) if like is None else torch.zeros_like(like)


def _same(one: Tensor, other: Tensor) -> bool:
    rounding = ROUNDINGS * torch.finfo(one.dtype).eps * peak(one)
    return one.shape == other.shape and peak(one - other) <= rounding


def _doubled(grads: Grads) -> Grads:
    return [None if grad is None else 2 * grad for grad in grads]


def _others(grads: Grads, seed: int) -> Grads:
    generator = torch.Generator().manual_seed(seed)
    return [None if grad is None else layouts.incoming(grad, generator) for grad in grads]


def _mixed(one: Grads, other: Grads, a: float, b: float) -> Grads:
    pairs = zip(one, other, strict=True)
    return [None if u is None or v is None else a * u + b * v for u, v in pairs]


MOST = 32
"""Elements of what comes in that are looked at one at a time, at most."""

LARGEST = 1 << 18
"""Weights in a table, at most."""

ROUGH_INFLUENCE = 1e-2
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
    return bool(off.isfinite().all()) and peak(off) <= ROUGH_INFLUENCE * max(peak(got), peak(expected))


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
