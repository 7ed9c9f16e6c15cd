"""Detect a gradient that ignores its grad_output, in whole or in part, or is not linear in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.precision import precision
from opsmith.checking.diagnosis.evidence import COMPARISONS, Detection, Evidence, along
from opsmith.checking.diagnosis.observation import ROUNDINGS, Grads, Observation
from opsmith.checking.samples.grad_outputs import random_grad_output
from opsmith.judging.compare import (
    all_close,
    all_finite,
    in_double,
    largest_magnitude,
    share_of_largest,
)
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
    first = evidence.first
    if first.observer is None:
        return
    rounded = next(precision(evidence), None) is not None  # rounding is not linear
    for test in (ignores_grad,) if rounded else (ignores_grad, nonlinear):
        reasons = (test(pair.backward, [*pair.grads.values()]) for pair in evidence.pairs)
        found = next(reasons)
        if found is not None and all(reasons):
            for_ones = test is ignores_grad and first.equals(first.if_changed(torch.ones_like))
            yield Detection(found[0], found[1] + ", and is right for ones alone" * for_ones)
            return
    for words, take in UNIFORM.items() if any(grad.numel() > 1 for grad in first.given.values()) else ():
        predicted = partial(Observation.if_changed, change=partial(_uniform, take=take))
        reason = f"it takes the grad_output to be {words}"
        yield Detection("ignores-grad-output", reason, predicted=predicted)


def _uniform(grad: Tensor, take: Callable[[Tensor], Tensor]) -> Tensor:
    return take(grad).expand(grad.shape).clone() if grad.dim() and grad.numel() else grad


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
    in_float32 = cache(partial(_in_float32, backward, grads))
    for a, b in COMBINATIONS:
        every = (backward(_mixed(grads, others, a, b)), u, v)
        known = next((each for each in every if each is not None), None)
        if known is None:
            continue
        got, first, second = (in_double(torch.zeros_like(known) if each is None else each) for each in every)
        terms, off = (got, a * first, b * second), got - a * first - b * second
        size = largest_magnitude(off)
        if not all_finite(off) or size <= _rounding(known.dtype, terms):
            continue
        if known.dtype == torch.float64 and size <= _rounding(torch.float32, terms) and in_float32():
            continue
        return "nonlinear-grad", _reason(a, b, size / (share_of_largest(1.0, *terms) or 1.0))
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
    words = f"for {a:g} times as much it is not {a:g} times as large"
    if b:
        words = (
            f"for {a:g} u {b:+g} v it is not {a:g} times that of u {b:+g} times that of v (off by {off:.1g})"
        )
    return f"it is not linear in the grad_output: {words}"


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

FEW = 3
"""With fewer missing or present weights, their indices may fit by chance."""


def jacobian_sparsity(evidence: Evidence) -> Iterator[Detection]:
    """Detect missing entries of the Jacobian, by their indices, on every pair."""
    for name in evidence.first.given:
        tables: list[JacobianRows] = []
        for table in (_table(pair, name) for pair in evidence.pairs):
            if table is None:
                break
            tables.append(table)
        missing, there = (sum(int(getattr(each, kind).sum()) for each in tables) for kind in KINDS)
        if len(tables) < len(evidence.pairs) or min(missing, there) < FEW:
            continue
        for words, related in _relations(tables[0], evidence.first.of(name)):
            if all(table.separated(related(table)) for table in tables):
                yield Detection("missing-term", words, {"weights missing": f"{missing} of {missing + there}"})


KINDS = ("missing", "there")


@dataclass(frozen=True)
class JacobianRows:
    """Rows of a Jacobian: the weight of some elements of the grad_output in each element of the gradient.

    Args:
        missing: Mask of the weights that are zero where the right ones are not, as [elements of the
            grad_output, *shape of the gradient].
        there: Mask of the weights that are right, and not zero.
        outer: Index into the grad_output along each dimension, aligned with the weights.
        inner: Index into the gradient along each dimension, aligned with the weights.
        alike: True if both have the same shape.
    """

    missing: Tensor
    there: Tensor
    outer: Sequence[Tensor]
    inner: Sequence[Tensor]
    alike: bool

    def of_missing(self, values: Tensor) -> Tensor:
        """Return the values of the missing weights."""
        return values.expand(self.missing.shape)[self.missing]

    def separated(self, related: Tensor) -> bool:
        """Return True if a relation holds for all missing weights, and for no present one."""
        present = related.expand(self.there.shape)[self.there]
        return bool(self.of_missing(related).all()) and not bool(present.any())

    def apart(self, p: int, q: int) -> Tensor:
        """Distance of the index along a dimension of the grad_output from one of the gradient."""
        return self.outer[p] - self.inner[q]


def _table(pair: Observation, name: str) -> JacobianRows | None:
    """Compute the rows of some elements; None where weights are neither right nor missing."""
    grad, shape = pair.given.get(name), pair.expected.shape
    if pair.exact is None or grad is None or not pair.same_shape or not grad.dim() * len(shape):
        return None
    if not grad.numel() * shape.numel() or grad.is_complex() or pair.expected.is_complex():
        return None
    count = min(MOST, LARGEST // shape.numel())
    chosen = torch.randperm(grad.numel(), generator=torch.Generator().manual_seed(0))[:count]
    missing, there = [], []
    for at in chosen.tolist():
        grads = pair.grads_of_element(name, at, 1.0)
        right = pair.right_for(grads)
        if right is None:
            return None
        got = pair.backward([grads.get(each) for each in pair.grads])
        row = replace(pair, computed=got, right=right, tolerance=pair.slack)
        if not row.same_shape or not bool((row.got.isfinite() & row.expected.isfinite()).all()):
            return None
        none, agrees = row.agrees_with(torch.zeros_like(right)), row.agrees_with(right)
        if not bool((none | agrees).all()):
            return None
        missing.append(none & ~agrees)
        there.append(agrees & ~none)
    outer = [along(each, 0, 1 + len(shape)) for each in torch.unravel_index(chosen, grad.shape)]
    inner = [along(torch.arange(size), dim, len(shape)) for dim, size in enumerate(shape)]
    return JacobianRows(torch.stack(missing), torch.stack(there), outer, inner, grad.shape == shape)


Related = Callable[[JacobianRows], Tensor]
"""Mask of the weights of a table for which a relation of indices holds."""


def _relations(table: JacobianRows, of: str) -> Iterator[tuple[str, Related]]:
    """Yield relations between indices of the grad_output and of the gradient, the simplest first."""
    if table.alike:
        others = f"that of the others{_along(table)} is missing"
        yield f"it has only the grad_output of the same element{of}; {others}", _other_element
        words = f"it lacks the grad_output of the same element{of}, and has that of the others"
        yield words, lambda table: ~_other_element(table)
    pairs = product(range(len(table.outer)), range(len(table.inner)))
    for p, q in sorted(pairs, key=lambda each: each[0] != each[1]):
        index = f"the index of dimension {p}{of}"
        for relation, (_, word, _) in COMPARISONS.items():
            words = f"it lacks the grad_output where {index} is {word} its own of dimension {q}"
            yield words, partial(_related, p=p, q=q, relation=relation)
        steps = table.of_missing(table.apart(p, q)).unique().tolist()
        if len(steps) == 1:
            words = f"{abs(steps[0])} {'after' if steps[0] > 0 else 'before'} its own index"
            words = f"it lacks the grad_output {words}, of dimension {p}{of} beside dimension {q}"
            yield words, partial(_related, p=p, q=q, relation=torch.eq, step=steps[0])


def _related(
    table: JacobianRows, p: int, q: int, relation: Callable[[Tensor, Tensor], Tensor], step: int = 0
) -> Tensor:
    return relation(table.apart(p, q), torch.tensor(step))


def _other_element(table: JacobianRows) -> Tensor:
    apart = (table.apart(dim, dim) != 0 for dim in range(len(table.outer)))
    return torch.stack(torch.broadcast_tensors(*apart)).any(0)


def _along(table: JacobianRows) -> str:
    """List the dimensions along which weights are missing, unless these are all."""
    dims = range(len(table.outer))
    apart = [dim for dim in dims if bool(table.of_missing(table.apart(dim, dim)).any())]
    if len(apart) == len(dims):
        return ""
    return f" along dimension{'s' * (len(apart) > 1)} {' and '.join(map(str, apart))}"
