"""Incoming gradients to try on a sample: in every layout, and for each result alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opsmith.checking.differentiated import results_with_gradient
from opsmith.checking.layouts import LAYOUTS, PLAIN, incoming
from opsmith.checking.sample import Sample, replica
from opsmith.checking.subject import Subject


@dataclass(frozen=True)
class Probe:
    """Incoming gradients.

    Args:
        name: What they are, in words.
        grads: One for each visible result, in float64 or complex128; None where none comes in.
        plain: Whether all of them are contiguous, as gradcheck makes them.
    """

    name: str
    grads: tuple[Tensor | None, ...]
    plain: bool

    def at(self, dtype: torch.dtype, device: torch.device) -> list[Tensor | None]:
        """The gradients in another dtype and on another device, in their layout."""
        return [replica(grad, dtype, device) for grad in self.grads]

    def contiguous(self, dtype: torch.dtype, device: torch.device) -> list[Tensor | None]:
        """The same numbers, contiguous."""
        return [None if grad is None else grad.contiguous() for grad in self.at(dtype, device)]


def probes(subject: Subject, sample: Sample, results: Sequence[Tensor]) -> list[Probe]:
    """The incoming gradients to try on a call with these results.

    The plain ones come first, for each result alone (so that a formula that forgets one is found out), then
    for all of them.

    Args:
        subject: What is under check.
        sample: The sample.
        results: What the operator returns for a sample, in float64.
    """
    open_ = results_with_gradient(subject, sample, results)
    generator = subject.generator()
    every = {
        layout: tuple(
            incoming(r, layout, generator) if o else None for r, o in zip(results, open_, strict=True)
        )
        for layout in LAYOUTS
    }
    alone = [
        Probe(
            f"{PLAIN}, for `{result.name}` alone",
            tuple(grad if at == position else None for at, grad in enumerate(every[PLAIN])),
            True,
        )
        for position, result in enumerate(subject.results(sample))
        if open_[position] and sum(open_) > 1
    ]
    return [*alone, *(Probe(layout, grads, layout == PLAIN) for layout, grads in every.items())]


def plain_probe(subject: Subject, sample: Sample, results: Sequence[Tensor]) -> Probe:
    """Contiguous gradients for all results."""
    return next(probe for probe in probes(subject, sample, results) if probe.name == PLAIN)
