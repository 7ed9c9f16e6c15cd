"""Whether a gradient is off by rounding alone, though by more than its own size and its inputs explain.

The bound of an element is measured on the right gradient; another formula for it, as good, may subtract
numbers that are larger than what is left. Its error is then tiny beside the largest element, and another
one altogether when inputs and incoming gradient move a little. That of a wrong formula moves as little as
they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.derivative import vjp
from opsmith.checking.difference import Difference
from opsmith.checking.nudging import nudged
from opsmith.checking.probes import Probe
from opsmith.checking.right_gradient import RightGradient
from opsmith.checking.rounding import Bound
from opsmith.checking.sample import replica
from opsmith.checking.subject import NUDGES

DRAWS = 16
"""At most: one is enough that shows it. Of four, all look alike once in a hundred times."""

KEPT = 0.75
"""The share of the dtype's digits that must be right: what computes in a narrower dtype has fewer."""

MOVED = 0.5
"""They move by half of the digits: less may not change how a number near one is rounded."""

AGAIN = 4.0
"""How many times one of these errors that of another dtype may be: there are few of them."""

ROUGH = 0.5
"""What part of the error is another one then, at least once."""


def only_rounding(
    right: RightGradient,
    place: int,
    subset: tuple[int, ...],
    probe: Probe,
    got: Tensor,
    bound: Bound,
    difference: Difference,
) -> bool:
    """Whether an element of a gradient is off by rounding alone.

    In float64 its error has to be tiny and rough; in another dtype, as much larger than the operator's error
    in float64 as the dtype is coarser.

    Args:
        right: The right gradients, which finite differences bear out.
        place: The input.
        subset: The inputs that required a gradient.
        probe: What came in.
        got: The gradient.
        bound: What it may be.
        difference: Its worst element.
    """
    dtype = got.dtype.to_real() if got.is_complex() else got.dtype
    error = got.detach().cpu().to(bound.truth.dtype) - bound.truth
    worst, eps = abs(complex(error[difference.index])), torch.finfo(dtype).eps
    fine = torch.finfo(torch.float64).eps
    others = partial(_errors, right, place, subset, probe, got.device, difference.index)
    if dtype != torch.float64:
        return any(worst <= AGAIN * eps / fine * abs(other) for other in others())
    if not bool(error.abs().max() <= fine**KEPT * bound.truth.abs().max()):
        return False
    return any(abs(other - complex(error[difference.index])) > ROUGH * worst for other in others())


def _errors(
    right: RightGradient,
    place: int,
    subset: tuple[int, ...],
    probe: Probe,
    device: torch.device,
    index: tuple[int, ...],
) -> Iterator[complex]:
    """The errors of one element in float64, each with other inputs that differ by little."""
    generator = right.subject.generator(NUDGES)
    step = torch.finfo(torch.float64).eps ** MOVED
    for _ in range(DRAWS):
        flat = [nudged(value, step, generator) for value in right.sample.at(torch.float64, device)]
        grads = [nudged(grad, step, generator) for grad in probe.at(torch.float64, device)]
        found = vjp(partial(right.subject.call, right.sample), [*map(replica, flat)], subset, grads)
        answer = None if found is None else found[subset.index(place)]
        if answer is None:
            return
        values = [replica(each, device=torch.device("cpu")) for each in flat]
        incoming = [replica(each, device=torch.device("cpu")) for each in grads]
        truth = right.by_reference(values, incoming)[right.places.index(place)]
        yield complex((answer.detach().cpu() - truth)[index])
