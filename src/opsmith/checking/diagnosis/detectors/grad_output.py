"""Detect a gradient that ignores all or a part of its grad_output, or is not linear in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.precision import precision
from opsmith.checking.diagnosis.observation import ROUNDINGS, Detection, Evidence, Grads, Observation
from opsmith.checking.samples.grad_outputs import random_grad_output
from opsmith.judging.compare import (
    all_close,
    all_finite,
    in_double,
    largest_magnitude,
    share_of_largest,
)

Backward = Callable[[Grads], Tensor]
"""Function from grad_outputs, one for each result, to the gradient of an input."""

UNIFORM: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "its first element": lambda grad: grad.flatten()[0],
        "its last element": lambda grad: grad.flatten()[-1],
        "its mean": lambda grad: grad.mean(),
        "its sum": lambda grad: grad.sum(),
    }
)
"""Uniform tensors that a backward may use instead of a grad_output."""

ROOM = 16.0
"""Multiple of the rounding error; a smaller nonlinearity is not evidence."""


def grad_output_dependence(evidence: Evidence) -> Iterator[Detection]:
    """Detect a gradient that, on all inputs, does not depend on its grad_output, or is not linear in it."""
    first = evidence.first
    if first.observer is None:
        return
    rounded = next(precision(evidence), None) is not None  # rounding is not linear
    for test in (ignores_grad,) if rounded else (ignores_grad, nonlinear):
        reasons = (test(pair.backward, [*pair.grads.values()]) for pair in evidence.pairs)
        found = next(reasons)
        if found is not None and all(reasons):
            for_ones = test is ignores_grad and first.equals(first.if_changed(torch.ones_like))
            yield Detection(found[0], found[1] + ", and is right only for a grad_output of ones" * for_ones)
            return
    for words, take in UNIFORM.items() if any(grad.numel() > 1 for grad in first.given.values()) else ():
        predicted = partial(Observation.if_changed, change=partial(_uniform, take=take))
        reason = f"it replaces every element of the grad_output by {words}"
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
    bound = share_of_largest(ROUNDINGS * torch.finfo(first.dtype).eps, first)
    others = (_mixed(grads, grads, 1.0, 1.0), _others(grads, 1))
    if not first.any() or not all(all_close(first, backward(each), bound) for each in others):
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
    for a, b in COMBINATIONS:
        got = backward(_mixed(grads, others, a, b))
        terms = (in_double(got), a * in_double(u), b * in_double(v))
        off, size = terms[0] - terms[1] - terms[2], share_of_largest(1.0, *terms)
        eps = max(torch.finfo(dtype).eps for dtype in (got.dtype, torch.float32))  # maybe its dtype
        if all_finite(off) and largest_magnitude(off) > ROOM * ROUNDINGS * eps * size:
            return "nonlinear-grad", _reason(a, b, largest_magnitude(off) / size)
    return None


COMBINATIONS = ((2.0, 0.0), (-1.0, 0.0), (0.0, 0.0), (1.5, -0.75), (64.0, 1.0), (1 / 64, 0.0))
"""Factors of the two grad_outputs of a sum."""


def _reason(a: float, b: float, off: float) -> str:
    if not a and not b:
        return "it is not zero for a grad_output of zeros, so it is not linear in the grad_output"
    words = f"for {a:g} times the grad_output, it is not {a:g} times as large"
    if b:
        words = (
            f"for {a:g} u {b:+g} v, it is not {a:g} times the gradient for u {b:+g} times the "
            f"gradient for v (off by {off:.1g})"
        )
    return f"it is not linear in the grad_output: {words}"


def _others(grads: Grads, seed: int) -> Grads:
    generator = torch.Generator().manual_seed(seed)
    return [None if grad is None else random_grad_output(grad, generator) for grad in grads]


def _mixed(one: Grads, other: Grads, a: float, b: float) -> Grads:
    pairs = zip(one, other, strict=True)
    return [None if u is None or v is None else a * u + b * v for u, v in pairs]
