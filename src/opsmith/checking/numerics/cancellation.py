"""Whether a gradient is off by rounding alone, though by more than its own size and its inputs explain.

The bound of an element is measured on the right gradient; another formula for it, as good, may subtract
numbers that are larger than what is left. Its error is then tiny beside the largest element, and another
one altogether when inputs and incoming gradient move a little. That of a wrong formula moves as little as
they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.autodiff import vjp, with_gradient
from opsmith.checking.numerics.compare import Difference
from opsmith.checking.numerics.rounding import Bound
from opsmith.checking.properties.numeric.gradient_truth import RightGradient
from opsmith.checking.samples.cases import NARROW, short
from opsmith.checking.samples.grad_outputs import Probe
from opsmith.checking.samples.perturb import nudged
from opsmith.checking.samples.sample import Sample, replica
from opsmith.checking.subject import NUDGES, Subject
from opsmith.core.calls import tensors_in
from opsmith.torch_library import capabilities

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


FEWER = (torch.float32, *NARROW)
PARTS = 16
"""Multiples of one over this are the same in every dtype."""


def narrow_operand(compute: Callable[[], Any], *, mixed: bool = True) -> str | None:
    """The first operation that takes a tensor of fewer digits than float64 has, and what it takes.

    Whole numbers, halves and quarters, as in a mask, lose nothing and do not count.

    Args:
        compute: Computes in float64.
        mixed: Whether it has to take one of float64 as well.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64)
        >>> narrow_operand(lambda: x * torch.full((2,), 0.1))
        'aten.mul.Tensor takes float32 beside float64'
        >>> narrow_operand(lambda: x * 0.1)
    """
    found: list[str] = []

    def given(operator: Any, args: Sequence[Any]) -> None:
        tensors = [*tensors_in(list(args))]
        wide = [each for each in tensors if each.dtype in (torch.float64, torch.complex128)]
        if found or (mixed and not wide):
            return
        for each in tensors:
            if each.dtype in FEWER and _rounded(each):
                found[:] = [f"{operator} takes {short(each.dtype)}{' beside float64' * bool(wide)}"]

    with capabilities.watching(lambda operator, kwargs: None, given):
        compute()
    return found[0] if found else None


def _rounded(tensor: Tensor) -> bool:
    return bool((tensor.detach().double() * PARTS).frac().any())


def only_in_backward(subject: Subject, sample: Sample, places: Sequence[int], probe: Probe) -> str | None:
    """The operation by which the backward, and not the forward, mixes in fewer digits; None for none.

    Args:
        subject: What is under check.
        sample: The sample, which is run in float64.
        places: The inputs that require a gradient.
        probe: What comes in.
    """
    flat = sample.at(torch.float64)
    for place in places:
        flat[place].requires_grad_()
    results: list[Any] = []
    with torch.enable_grad():
        if narrow_operand(lambda: results.extend(subject.call(sample, flat)), mixed=False) is not None:
            return None
    grads = probe.at(torch.float64, torch.device("cpu"))
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and with_gradient(r)]
    inputs = [flat[place] for place in places]
    outputs, incoming = [result for result, _ in pairs], [grad for _, grad in pairs]
    return narrow_operand(partial(torch.autograd.grad, outputs, inputs, incoming, allow_unused=True))
