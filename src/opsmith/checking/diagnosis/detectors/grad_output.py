"""Detect a gradient that ignores its grad_output, in whole or in part, or is not linear in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.precision import precision
from opsmith.checking.diagnosis.evidence import COMPARISONS, Detection, Evidence
from opsmith.checking.diagnosis.observation import ROUNDINGS, Grads, Observation
from opsmith.checking.samples.grad_outputs import random_grad_output
from opsmith.judging.compare import all_close, in_double, is_close, largest_magnitude, share_of_largest
from opsmith.judging.working_precision import working_precision

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
    if evidence.first.observer is None:
        return
    rounded = next(precision(evidence), None) is not None  # rounding is not linear
    for test in (ignores_grad,) if rounded else (ignores_grad, nonlinear):
        reasons = (test(pair.backward, [*pair.grads.values()]) for pair in evidence.pairs)
        found = next(reasons)
        if found is not None and all(reasons):
            for_ones = found[0] == "ignores-grad-output" and evidence.first.equals(
                evidence.first.with_grads(lambda _, grad: torch.ones_like(grad))
            )
            yield Detection(found[0], found[1] + ", and is right for ones alone" * for_ones)
            return
    yield from evidence.first_fitting(
        Detection(
            "ignores-grad-output",
            f"it takes the grad_output to be {words}",
            predicted=partial(_as_if, take=take),
        )
        for words, take in UNIFORM.items()
    )


def ignores_grad(backward: Backward, grads: Grads) -> tuple[str, str] | None:
    """Return the cause and the reason if a gradient does not depend on the grad_outputs; else None.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0])
        >>> ignores_grad(lambda grads: 2 * x, [torch.tensor([0.3, -1.0])])
        ('ignores-grad-output', 'it is the same for every grad_output')
    """
    first = backward(grads)
    if first is None or not first.any():
        return None
    bound = share_of_largest(ROUNDINGS * torch.finfo(first.dtype).eps, first)
    for others in (_mixed(grads, grads, 1.0, 1.0), _others(grads, 1)):
        again = backward(others)
        if again is None or not all_close(first, again, bound):
            return None
    return "ignores-grad-output", "it is the same for every grad_output"


def nonlinear(backward: Backward, grads: Grads) -> tuple[str, str] | None:
    """Return the cause and the reason if a gradient is not linear in the grad_outputs; else None.

    Rounding is not linear: a computation in a lower precision than float32 is detected, too.

    Example:
        >>> import torch
        >>> nonlinear(lambda grads: grads[0] * grads[0], [torch.tensor([0.3, -1.0])])[0]
        'nonlinear-grad'
    """
    others = _others(grads, 2)
    u, v = backward(grads), backward(others)
    single: bool | None = None
    for a, b in COMBINATIONS:
        mixed = backward(_mixed(grads, others, a, b))
        known = next((each for each in (mixed, u, v) if each is not None), None)
        if known is None:
            continue
        got, first, second = (
            in_double(torch.zeros_like(known) if each is None else each) for each in (mixed, u, v)
        )
        terms, together = (got, a * first, b * second), a * first + b * second
        off = got - together
        if not off.isfinite().all() or all_close(got, together, _rounding(known.dtype, terms)):
            continue
        if known.dtype == torch.float64 and all_close(got, together, _rounding(torch.float32, terms)):
            single = _in_float32(backward, grads) if single is None else single
            if single:
                continue
        far = largest_magnitude(off) / (share_of_largest(1.0, *terms) or 1.0)
        return "nonlinear-grad", _reason(a, b, far)
    return None


COMBINATIONS = ((2.0, 0.0), (-1.0, 0.0), (0.0, 0.0), (1.5, -0.75), (64.0, 1.0), (1 / 64, 0.0))
"""Factors of two grad_outputs that are added up."""


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


def _as_if(pair: Observation, take: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Compute the right gradient for grad_outputs that are made uniform."""
    if not any(grad.numel() > 1 for grad in pair.given.values()):
        return None
    return pair.with_grads(
        lambda _, grad: take(grad).expand(grad.shape).clone() if grad.dim() and grad.numel() else grad
    )


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
    for name in evidence.first.given:
        tables = _tables(evidence, name)
        missing, there = (sum(int(getattr(each, kind).sum()) for each in tables) for kind in KINDS)
        if min(missing, there) < FEW:
            continue
        for words, related in _relations(tables[0], evidence.first.of(name)):
            if all(table.separated(related(table)) for table in tables):
                yield Detection("missing-term", words, {"weights missing": f"{missing} of {missing + there}"})
                return


def _tables(evidence: Evidence, name: str) -> list[JacobianRows]:
    """Compute the rows of all pairs; none where weights of one are neither right nor missing."""
    tables: list[JacobianRows] = []
    for pair in evidence.pairs:
        table = _table(pair, name)
        if table is None:
            return []
        tables.append(table)
    return tables


KINDS = ("missing", "there")


@dataclass(frozen=True)
class JacobianRows:
    """Rows of a Jacobian: the weight of some elements of the grad_output in each element of the gradient.

    Args:
        missing: Mask of the weights that are zero where the right ones are not, as [elements of the
            grad_output, *shape of the gradient].
        there: Mask of the weights that are right, and not zero.
        at: Indices of the elements of the grad_output, as [elements, dimensions].
        shape: Shape of the grad_output.
    """

    missing: Tensor
    there: Tensor
    at: Tensor
    shape: torch.Size

    def outer(self, dim: int) -> Tensor:
        """Index into the grad_output along a dimension, aligned with the table."""
        return self.at[:, dim].reshape(-1, *[1] * (self.missing.dim() - 1))

    def inner(self, dim: int) -> Tensor:
        """Index into the gradient along a dimension, aligned with the table."""
        shape = self.missing.shape[1:]
        return torch.arange(shape[dim]).reshape(-1, *[1] * (len(shape) - dim - 1))[None]

    def of_missing(self, values: Tensor) -> Tensor:
        """Return the values of the missing weights."""
        return values.expand(self.missing.shape)[self.missing]

    def separated(self, related: Tensor) -> bool:
        """Return True if a relation holds for all missing weights, and for no present one."""
        present = related.expand(self.there.shape)[self.there]
        return bool(self.of_missing(related).all()) and not bool(present.any())


def _table(pair: Observation, name: str) -> JacobianRows | None:
    """Compute the rows of some elements; None where weights are neither right nor missing."""
    grad = pair.given.get(name)
    if pair.exact is None or grad is None or not pair.same_shape or not pair.expected.dim():
        return None
    if not grad.dim() or grad.is_complex() or pair.expected.is_complex():
        return None
    count = min(MOST, LARGEST // max(pair.expected.numel(), 1))
    chosen = torch.randperm(grad.numel(), generator=torch.Generator().manual_seed(0))[:count]
    weights: list[tuple[Tensor, Tensor]] = []
    for at in chosen.tolist():
        grads = pair.grads_of_element(name, at, 1.0)
        got, right = pair.backward(grads), pair.right_for(grads)
        assert right is not None
        got = torch.zeros_like(right) if got is None else in_double(got)
        if got.shape != right.shape or not _either(got, right):
            return None
        weights.append((got, right))
    if not weights:
        return None
    computed, rights = (torch.stack(each) for each in zip(*weights, strict=True))
    rows = Observation(computed, rights)
    none, right = rows.agrees_with(torch.zeros_like(rows.expected)), rows.agrees_with(rows.expected)
    if not bool((rows.got.isfinite() & rows.expected.isfinite() & (none | right)).all()):
        return None
    at_each = torch.stack(torch.unravel_index(chosen, grad.shape), -1)
    return JacobianRows(none & ~right, right & ~none, at_each, grad.shape)


def _either(got: Tensor, expected: Tensor) -> bool:
    """Return True if each weight is roughly right or zero, so that the other rows are worth computing."""
    bound = share_of_largest(ROUGH_WEIGHT, got, expected)
    return bool((is_close(got, torch.zeros_like(got), bound) | is_close(got, expected, bound)).all())


Related = Callable[[JacobianRows], Tensor]
"""Mask of the weights of a table for which a relation of indices holds."""


def _relations(table: JacobianRows, of: str) -> Iterator[tuple[str, Related]]:
    """Yield relations between indices of the grad_output and of the gradient, the simplest first."""
    outer, inner = table.shape, table.missing.shape[1:]
    if outer == inner:
        others = f"that of the others{_along(table)} is missing"
        yield (
            f"it has only the grad_output of the same element{of}; {others}",
            lambda table: ~_same_element(table),
        )
        words = f"it lacks the grad_output of the same element{of}, and has that of the others"
        yield words, _same_element
    pairs = product(range(len(outer)), range(len(inner)))
    for p, q in sorted(pairs, key=lambda each: each[0] != each[1]):
        index = f"the index of dimension {p}{of}"
        for relation, (_, word, _) in COMPARISONS.items():
            words = f"it lacks the grad_output where {index} is {word} its own of dimension {q}"
            yield words, partial(_related, p=p, q=q, relation=relation)
        steps = table.of_missing(table.outer(p) - table.inner(q)).unique().tolist()
        if len(steps) == 1:
            words = f"{abs(steps[0])} {'after' if steps[0] > 0 else 'before'} its own index"
            words = f"it lacks the grad_output {words}, of dimension {p}{of} beside dimension {q}"
            yield words, partial(_related, p=p, q=q, relation=partial(_apart, step=steps[0]))


def _related(table: JacobianRows, p: int, q: int, relation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return relation(table.outer(p), table.inner(q))


def _apart(outer: Tensor, inner: Tensor, step: int) -> Tensor:
    return outer - inner == step


def _same_element(table: JacobianRows) -> Tensor:
    held = torch.ones(table.missing.shape, dtype=torch.bool)
    for dim in range(len(table.shape)):
        held &= table.outer(dim) == table.inner(dim)
    return held


def _along(table: JacobianRows) -> str:
    """List the dimensions along which weights are missing, unless these are all."""
    dims = range(len(table.shape))
    apart = [dim for dim in dims if bool(table.of_missing(table.outer(dim) != table.inner(dim)).any())]
    if len(apart) == len(dims):
        return ""
    return f" along dimension{'s' * (len(apart) > 1)} {' and '.join(map(str, apart))}"
