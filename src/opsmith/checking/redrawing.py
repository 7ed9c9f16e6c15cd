"""Fresh inputs of the same shapes: a hypothesis that only fits the numbers at hand does not survive them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from opsmith.checking.sample import Sample, is_inexact
from opsmith.checking.subject import Subject

SPREAD = 0.4


def redrawn(subject: Subject, sample: Sample, seed: int) -> Sample | None:
    """The sample with other numbers, each of the same sign and of some such size: so it stays in the domain.

    Args:
        subject: What is under check.
        sample: The sample.
        seed: Seed of the numbers.

    Returns:
        The fresh sample; None where it has no floating tensors.
    """
    if not sample.inexact:
        return None
    generator = torch.Generator().manual_seed(subject.seed * 1009 + seed + 1)
    return replace(sample, flat=tuple(_redrawn(value, generator) for value in sample.at()))


def _redrawn(value: Any, generator: torch.Generator) -> Any:
    if not is_inexact(value) or not value.numel():
        return value
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return value * (1 + SPREAD * noise.to(value.device)).to(
        value.real.dtype if value.is_complex() else value.dtype
    )
