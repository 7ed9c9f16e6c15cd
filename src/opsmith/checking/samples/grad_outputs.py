"""grad_outputs to try on a sample: for all results together, and for each alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opsmith.checking.properties.numeric.differentiable import results_with_gradient
from opsmith.checking.samples.memory_layouts import PLAIN, random_grad_output
from opsmith.checking.samples.sample import Sample, replica
from opsmith.checking.subject import Subject


@dataclass(frozen=True)
class GradOutputs:
    """Named grad_outputs for the results of a sample.

    Args:
        name: Description.
        grads: One for each visible result, in float64 or complex128; None for no gradient.
    """

    name: str
    grads: tuple[Tensor | None, ...]

    def at(self, dtype: torch.dtype, device: torch.device) -> list[Tensor | None]:
        """Return the gradients in another dtype and on another device."""
        return [replica(grad, dtype, device) for grad in self.grads]


def grad_outputs_to_try(subject: Subject, sample: Sample, results: Sequence[Tensor]) -> list[GradOutputs]:
    """Make the grad_outputs to try on a call with these results.

    First for each result alone, so that a formula that ignores one is detected; then for all of them. They
    are contiguous: the property `layouts` tries others.

    Args:
        subject: The checked operator.
        sample: The sample.
        results: Results of the operator for the sample, in float64.
    """
    open_ = results_with_gradient(subject, sample, results)
    generator = subject.generator()
    every = tuple(
        random_grad_output(r, generator) if o else None for r, o in zip(results, open_, strict=True)
    )
    alone = [
        GradOutputs(
            f"{PLAIN}, for `{result.name}` alone",
            tuple(grad if at == position else None for at, grad in enumerate(every)),
        )
        for position, result in enumerate(subject.results(sample))
        if open_[position] and sum(open_) > 1
    ]
    return [*alone, GradOutputs(PLAIN, every)]


def contiguous_grad_outputs(subject: Subject, sample: Sample, results: Sequence[Tensor]) -> GradOutputs:
    """Return contiguous grad_outputs for all results."""
    return next(probe for probe in grad_outputs_to_try(subject, sample, results) if probe.name == PLAIN)
