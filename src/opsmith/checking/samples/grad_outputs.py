"""grad_outputs to try on a sample: for all results together, and for each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.autodiff import has_gradient, record
from opsmith.checking.samples.memory_layouts import PLAIN
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject, computed_once
from opsmith.judging.compare import all_finite
from opsmith.judging.tensors import CPU, is_inexact, replica


@dataclass(frozen=True)
class GradOutputs:
    """Named grad_outputs for the results of a sample.

    Args:
        name: Description.
        grads: A grad_output for each visible result, in float64 or complex128; None for no gradient.
    """

    name: str
    grads: tuple[Tensor | None, ...]

    def at(self, dtype: torch.dtype, device: torch.device) -> list[Tensor | None]:
        """Return the gradients in another dtype and on another device."""
        return [replica(grad, dtype, device) for grad in self.grads]

    def beside(self, sample: Sample) -> Callable[[torch.dtype, torch.device], list[Any]]:
        """Return a function that makes the arguments of a sample, followed by the gradients."""
        return lambda dtype, device: [*sample.at(dtype, device), *self.at(dtype, device)]

    def in_double(self) -> list[Tensor | None]:
        """Return the gradients in float64 on the CPU, as a check computes with them."""
        return self.at(torch.float64, CPU)


def grad_outputs_to_try(subject: Subject, sample: Sample, results: Sequence[Tensor]) -> list[GradOutputs]:
    """Make the grad_outputs to try on a call with these results, which are in float64.

    They are first for each result alone, so that a formula that ignores one result is detected, then for all
    results. They are contiguous; the property `layouts` tries other layouts.
    """
    open_ = results_with_gradient(subject, sample, results)
    every = random_grad_outputs(results, open_, subject.generator())
    alone = [
        GradOutputs(
            f"{PLAIN}, for `{result.name}` alone",
            tuple(grad if at == position else None for at, grad in enumerate(every)),
        )
        for position, result in enumerate(subject.results(sample))
        if open_[position] and sum(open_) > 1
    ]
    return [*alone, GradOutputs(PLAIN, tuple(every))]


@computed_once
def plain_grad_outputs(subject: Subject, sample: Sample) -> GradOutputs:
    """Return contiguous grad_outputs for all results of a sample in float64, which a first run determines.

    All properties share them, so each call must get copies, by `at` or `in_double`.
    """
    with torch.no_grad():
        results = subject.call(sample, sample.in_double())
    return grad_outputs_to_try(subject, sample, results)[-1]


def results_with_gradient(subject: Subject, sample: Sample, results: Sequence[Tensor]) -> list[bool]:
    """For each visible result, True if it takes a grad_output."""
    marked: frozenset[int] = frozenset()
    if subject.kind.own_forward and len(results) > 1:
        marked = _marked(subject, sample)
    return [
        described.differentiable and is_inexact(result) and at not in marked
        for at, (described, result) in enumerate(zip(subject.results(sample), results, strict=True))
    ]


@computed_once
def _marked(subject: Subject, sample: Sample) -> frozenset[int]:
    """The results that a class marks as non-differentiable: only these results have no graph."""
    with Overlooking():  # its exceptions are reported
        _, _, results = record(partial(subject.call, sample), sample.at(), sample.inexact)
        graphs = [*map(has_gradient, results)]
        return frozenset(at for at, graph in enumerate(graphs) if any(graphs) and not graph)
    return frozenset()


def random_grad_output(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a contiguous grad_output for a result, of its dtype and on its device.

    It is 0 where the result is not finite, as the -inf of a mask, since no loss sends a gradient there.

    Example:
        >>> import torch
        >>> random_grad_output(torch.ones(2, 3), torch.Generator()).stride()
        (3, 1)
    """
    wide = torch.complex128 if like.is_complex() else torch.float64
    drawn = torch.randn(tuple(like.shape), generator=generator, dtype=wide).to(like.device, like.dtype)
    return drawn if all_finite(like) else drawn.masked_fill(~like.detach().isfinite(), 0)


def random_grad_outputs(
    results: Sequence[Any], wanted: Sequence[bool], generator: torch.Generator
) -> list[Tensor | None]:
    """Draw a contiguous grad_output for each visible result that takes one; None for other results."""
    pairs = zip(results, wanted, strict=True)
    return [random_grad_output(result, generator) if takes else None for result, takes in pairs]
