"""Tensors of fewer digits than what comes in, that a computation mixes into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.case import NARROW, short
from opsmith.checking.derivative import with_gradient
from opsmith.checking.probes import Probe
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.calls import tensors_in
from opsmith.torch_library import capabilities

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
