"""How the gradient depends on the one that comes in: not at all, or not linearly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking import layouts
from opsmith.checking.diagnosis.comparable import peak, wide
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.observation import Grads
from opsmith.checking.diagnosis.pair import ROUNDINGS, Pair
from opsmith.checking.diagnosis.precision import precision
from opsmith.checking.diagnosis.seen import Seen

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
