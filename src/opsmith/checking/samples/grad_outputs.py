"""Incoming gradients to try on a sample: for all results together, and for each alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opsmith.checking.properties.numeric.differentiable import results_with_gradient
from opsmith.checking.samples.layouts import PLAIN, incoming
from opsmith.checking.samples.sample import Sample, replica
from opsmith.checking.subject import Subject


@dataclass(frozen=True)
class Probe:
    """Incoming gradients.

    Args:
        name: What they are, in words.
        grads: One for each visible result, in float64 or complex128; None where none comes in.
    """

    name: str
    grads: tuple[Tensor | None, ...]

    def at(self, dtype: torch.dtype, device: torch.device) -> list[Tensor | None]:
        """The gradients in another dtype and on another device."""
        return [replica(grad, dtype, device) for grad in self.grads]


def probes(subject: Subject, sample: Sample, results: Sequence[Tensor]) -> list[Probe]:
    """The incoming gradients to try on a call with these results.

    First for each result alone, so that a formula that forgets one is found out; then for all of them. They
    are contiguous: the property `layouts` tries what is not.

    Args:
        subject: What is under check.
        sample: The sample.
        results: What the operator returns for a sample, in float64.
    """
    open_ = results_with_gradient(subject, sample, results)
    generator = subject.generator()
    every = tuple(incoming(r, generator) if o else None for r, o in zip(results, open_, strict=True))
    alone = [
        Probe(
            f"{PLAIN}, for `{result.name}` alone",
            tuple(grad if at == position else None for at, grad in enumerate(every)),
        )
        for position, result in enumerate(subject.results(sample))
        if open_[position] and sum(open_) > 1
    ]
    return [*alone, Probe(PLAIN, every)]


def plain_probe(subject: Subject, sample: Sample, results: Sequence[Tensor]) -> Probe:
    """Contiguous gradients for all results."""
    return next(probe for probe in probes(subject, sample, results) if probe.name == PLAIN)
