"""Detect a gradient that ignores its grad_output, in whole or in part, or is not linear in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.precision import precision
from opsmith.checking.diagnosis.evidence import ROUNDINGS, Detection, Evidence, Pair
from opsmith.checking.diagnosis.observation import Grads, Observation
from opsmith.checking.numerics.compare import (
    all_close,
    in_double,
    is_close,
    largest_magnitude,
    share_of_largest,
)
from opsmith.checking.numerics.working_precision import working_precision
from opsmith.checking.samples.grad_outputs import random_grad_output
from opsmith.core.cached_property import cached_property

Backward = Callable[[Grads], Tensor | None]
"""Function from grad_outputs, one for each result, to the gradient of an input."""

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
"""Uniform tensors that a backward may use instead of a grad_output."""

ROOM = 16.0
"""Multiple of the rounding error below which a nonlinearity is not evidence."""


ROUGH = 0.6
"""Share of the digits that must hold in an ill-conditioned backward."""


def grad_output_dependence(evidence: Evidence) -> Iterator[Detection]:
    """Detect a gradient that does not depend on its grad_output, or not linearly, on all inputs."""
    if evidence.observation.backward is None:
        return
    rounded = next(precision(evidence), None) is not None  # rounding is not linear
    for test in (ignores_grad,) if rounded else (ignores_grad, nonlinear):
        reasons = []
        for pair in evidence.pairs:
            assert pair.observation.backward is not None
            reasons.append(test(pair.observation.backward, list(pair.observation.grads.values())))
            if reasons[-1] is None:
                break
        if all(reasons) and reasons[0] is not None:
            cause, reason = reasons[0]
            yield Detection(cause, reason + _right_for_ones(evidence, cause))
            return
    yield from evidence.first_fitting(
        (
            Detection("ignores-grad-output", f"it takes the grad_output to be {words}"),
            partial(_as_if, take=take),
        )
        for words, take in UNIFORM.items()
    )


def ignores_grad(backward: Backward, grads: Grads) -> tuple[str, str] | None:
    """Return the cause and the reason if a gradient does not depend on the grad_outputs; else None.

    Args:
        backward: Function from grad_outputs to the gradient.
        grads: First grad_outputs.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0])
        >>> ignores_grad(lambda grads: 2 * x, [torch.tensor([0.3, -1.0])])
        ('ignores-grad-output', 'it is the same for every grad_output')
    """
    first = backward(grads)
    if first is None or not first.any():
        return None
    for others in (_doubled(grads), _others(grads, 1)):
        again = backward(others)
        if again is None or not _same(first, again):
            return None
    return "ignores-grad-output", "it is the same for every grad_output"


def nonlinear(backward: Backward, grads: Grads) -> tuple[str, str] | None:
    """Return the cause and the reason if a gradient is not linear in the grad_outputs; else None.

    Rounding is not linear: a computation in a lower precision than float32 is detected, too.

    Args:
        backward: Function from grad_outputs to the gradient.
        grads: First grad_outputs.

    Example:
        >>> import torch
        >>> nonlinear(lambda grads: grads[0] * grads[0], [torch.tensor([0.3, -1.0])])[0]
        'nonlinear-grad'
    """
    one, other = grads, _others(grads, 2)
    alone = [backward(each) for each in (one, other)]
    single: bool | None = None
    for a, b in ((2.0, 0.0), (-1.0, 0.0), (0.0, 0.0), (1.5, -0.75), (64.0, 1.0), (1 / 64, 0.0)):
        mixed = backward(_mixed(one, other, a, b))
        parts = [in_double(_or_zeros(each, mixed)) for each in alone]
        if mixed is None:
            if largest_magnitude(a * parts[0] + b * parts[1]) > 0:
                return "nonlinear-grad", _reason(a, b, float("inf"))
            continue
        together = a * parts[0] + b * parts[1]
        off = in_double(mixed) - together
        if not bool(off.isfinite().all()):
            continue
        terms = (in_double(mixed), a * parts[0], b * parts[1])
        if not all_close(in_double(mixed), together, _rounding(mixed.dtype, terms)):
            if mixed.dtype == torch.float64 and all_close(
                in_double(mixed), together, _rounding(torch.float32, terms)
            ):
                single = _in_float32(backward, one) if single is None else single
                if single:
                    continue
            return "nonlinear-grad", _reason(
                a, b, largest_magnitude(off) / (share_of_largest(1.0, *terms) or 1.0)
            )
    return None


def _rounding(dtype: torch.dtype, terms: Sequence[Tensor]) -> float:
    """Return the error of a sum of terms that a computation in a dtype explains."""
    eps = torch.finfo(dtype).eps
    return share_of_largest(max(ROOM * ROUNDINGS * eps, eps**ROUGH), *terms)


def _in_float32(backward: Backward, grads: Grads) -> bool:
    """Return True if a backward computes in float32 for grad_outputs in float64."""
    found = working_precision(lambda given: [backward(given)], grads, torch.Generator().manual_seed(0))
    return found == torch.float32


def _reason(a: float, b: float, off: float) -> str:
    if not a and not b:
        return "it is not zero for a grad_output of zeros, so it is not linear in the grad_output"
    if not b:
        return f"it is not linear in the grad_output: for {a:g} times as much it is not {a:g} times as large"
    return (
        "it is not linear in the grad_output: "
        f"for {a:g} u {'+' if b > 0 else '-'} {abs(b):g} v it is not {a:g} times that of u "
        f"{'plus' if b > 0 else 'minus'} {abs(b):g} times that of v (off by {off:.1g})"
    )


def _as_if(pair: Pair, take: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Compute the right gradient for grad_outputs that are made uniform."""
    if not any(grad is not None and grad.numel() > 1 for grad in pair.observation.grads.values()):
        return None
    return pair.with_grads(
        lambda _, grad: take(grad).expand(grad.shape).clone() if grad.dim() and grad.numel() else grad
    )


def _right_for_ones(evidence: Evidence, cause: str) -> str:
    if cause != "ignores-grad-output":
        return ""
    for_ones = evidence.first.with_grads(lambda _, grad: torch.ones_like(grad))
    return ", and is right for ones alone" if evidence.first.equals(for_ones) else ""


def _or_zeros(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    return torch.zeros(()) if like is None else torch.zeros_like(like)


def _same(one: Tensor, other: Tensor) -> bool:
    return all_close(one, other, share_of_largest(ROUNDINGS * torch.finfo(one.dtype).eps, one))


def _doubled(grads: Grads) -> Grads:
    return [None if grad is None else 2 * grad for grad in grads]


def _others(grads: Grads, seed: int) -> Grads:
    generator = torch.Generator().manual_seed(seed)
    return [None if grad is None else random_grad_output(grad, generator) for grad in grads]


def _mixed(one: Grads, other: Grads, a: float, b: float) -> Grads:
    pairs = zip(one, other, strict=True)
    return [None if u is None or v is None else a * u + b * v for u, v in pairs]


MOST = 32
"""Largest number of elements of the grad_output that are tested one at a time."""

LARGEST = 1 << 18
"""Largest number of weights in a table."""

ROUGH_WEIGHT = 1e-2
"""Error relative to the largest weight up to which more weights are computed."""

FEW = 3
"""With fewer missing or present weights, their indices may fit by chance."""


def jacobian_sparsity(evidence: Evidence) -> Iterator[Detection]:
    """Detect missing entries of the Jacobian, by their indices, on every pair."""
    names = [name for name, grad in evidence.observation.grads.items() if grad is not None]
    for name in names:
        tables = []
        for pair in evidence.pairs:
            table = _table(pair, name)
            if table is None or not table.explains:
                break
            tables.append(table)
        if len(tables) < len(evidence.pairs):
            continue
        missing, there = (
            sum(int(getattr(table, kind).sum()) for table in tables) for kind in ("missing", "there")
        )
        if min(missing, there) < FEW:
            continue
        of = f" of `{name}`" if len(names) > 1 else " of the result"
        for words, related in _relations(tables[0], of):
            if all(_separates(table, related) for table in tables):
                measured = {"weights missing": f"{missing} of {missing + there}"}
                yield Detection("missing-term", words, measured)
                return


@dataclass(frozen=True)
class JacobianRows:
    """Rows of a Jacobian: the weight of some elements of the grad_output in each element of the gradient.

    Args:
        pair: Computed and right weights, as [elements of the grad_output, *shape of the gradient].
        at: Indices of the elements of the grad_output, as [elements, dimensions].
        shape: Shape of the grad_output.
    """

    pair: Pair
    at: Tensor
    shape: torch.Size

    @cached_property
    def there(self) -> Tensor:
        """Mask of the weights that are right, and not zero."""
        return self.pair.agrees_with(self.pair.expected) & ~self._none

    @cached_property
    def missing(self) -> Tensor:
        """Mask of the weights that are zero where the right ones are not."""
        return self._none & ~self.pair.agrees_with(self.pair.expected)

    @cached_property
    def explains(self) -> bool:
        """True if every weight is right or missing."""
        right = self.pair.expected
        finite = bool(right.isfinite().all() and self.pair.got.isfinite().all())
        return finite and bool((self._none | self.pair.agrees_with(right)).all())

    @cached_property
    def _none(self) -> Tensor:
        return self.pair.agrees_with(torch.zeros_like(self.pair.expected))

    def outer(self, dim: int) -> Tensor:
        """Index into the grad_output along a dimension, aligned with the table."""
        return self.at[:, dim].reshape(-1, *[1] * (self.pair.expected.dim() - 1))

    def inner(self, dim: int) -> Tensor:
        """Index into the gradient along a dimension, aligned with the table."""
        shape = self.pair.expected.shape[1:]
        return torch.arange(shape[dim]).reshape(-1, *[1] * (len(shape) - dim - 1))[None]


def _table(pair: Pair, name: str) -> JacobianRows | None:
    backward, right = pair.observation.backward, pair.observation.expected_for
    grad = pair.observation.grads.get(name)
    if backward is None or right is None or grad is None or not pair.same_shape or not pair.expected.dim():
        return None
    if not grad.dim() or grad.is_complex() or pair.expected.is_complex():
        return None
    count = min(MOST, LARGEST // max(pair.expected.numel(), 1))
    chosen = torch.randperm(grad.numel(), generator=torch.Generator().manual_seed(0))[:count]
    if not len(chosen):
        return None
    weights: list[tuple[Tensor, Tensor]] = []
    for at in chosen.tolist():
        grads = pair.observation.grads_of_element(name, at, 1.0)
        got, expected = backward(grads), right(grads)
        got = torch.zeros_like(expected) if got is None else got
        if got.shape != expected.shape or not _either(in_double(got), in_double(expected)):
            return None
        weights.append((got.detach().cpu(), expected.detach().cpu()))
    actual, expected_weights = (torch.stack(each) for each in zip(*weights, strict=True))
    at_each = torch.stack(torch.unravel_index(chosen, grad.shape), -1)
    return JacobianRows(Pair(Observation(actual, expected_weights)), at_each, grad.shape)


def _either(got: Tensor, expected: Tensor) -> bool:
    """Return True if each weight is roughly right or zero, so that the other rows are worth computing."""
    bound = share_of_largest(ROUGH_WEIGHT, got, expected)
    return bool((is_close(got, torch.zeros_like(got), bound) | is_close(got, expected, bound)).all())


Related = Callable[[JacobianRows], Tensor]
"""Mask of the weights of a table for which a relation of indices holds."""

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


def _separates(table: JacobianRows, related: Related) -> bool:
    """Return True if a relation holds for all missing weights, and for no present one."""
    held = related(table).expand(table.pair.expected.shape)
    return bool(held[table.missing].all()) and not bool(held[table.there].any())


def _relations(table: JacobianRows, of: str) -> Iterator[tuple[str, Related]]:
    """Yield relations between indices of the grad_output and of the gradient, the simplest first."""
    outer, inner = table.shape, table.pair.expected.shape[1:]
    if outer == inner:
        others = f"that of the others{_along(table)} is missing"
        yield f"it has only the grad_output of the same element{of}; {others}", _of_others
        words = f"it lacks the grad_output of the same element{of}, and has that of the others"
        yield words, _of_the_same
    pairs = [(p, q) for p in range(len(outer)) for q in range(len(inner))]
    for p, q in sorted(pairs, key=lambda each: each[0] != each[1]):
        index = f"the index of dimension {p}{of}"
        for word, relation in RELATIONS.items():
            words = f"it lacks the grad_output where {index} is {word} its own of dimension {q}"
            yield words, partial(_related, p=p, q=q, relation=relation)
        for step in _steps(table, p, q):
            words = f"it lacks the grad_output {abs(step)} {'after' if step > 0 else 'before'} its own index"
            yield f"{words}, of dimension {p}{of} beside dimension {q}", partial(_apart, p=p, q=q, step=step)


def _related(table: JacobianRows, p: int, q: int, relation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return relation(table.outer(p), table.inner(q))


def _apart(table: JacobianRows, p: int, q: int, step: int) -> Tensor:
    return table.outer(p) - table.inner(q) == step


def _of_others(table: JacobianRows) -> Tensor:
    return ~_of_the_same(table)


def _of_the_same(table: JacobianRows) -> Tensor:
    held = torch.ones(table.pair.expected.shape, dtype=torch.bool)
    for dim in range(len(table.shape)):
        held &= table.outer(dim) == table.inner(dim)
    return held


def _along(table: JacobianRows) -> str:
    """List the dimensions along which weights are missing, unless these are all."""
    dims = len(table.shape)
    apart = [
        dim
        for dim in range(dims)
        if bool((table.outer(dim) != table.inner(dim)).expand(table.missing.shape)[table.missing].any())
    ]
    if len(apart) == dims:
        return ""
    return f" along dimension{'s' * (len(apart) > 1)} {' and '.join(map(str, apart))}"


def _steps(table: JacobianRows, p: int, q: int) -> list[int]:
    """Return the difference of the indices of missing weights, if it is constant."""
    apart = (table.outer(p) - table.inner(q)).expand(table.missing.shape)[table.missing].unique()
    return [int(apart)] if len(apart) == 1 and int(apart) else []
