"""A wrong gradient, shown again by a few lines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opsmith.checking import replay
from opsmith.checking.probes import Probe
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject


def gradient_replay(
    subject: Subject,
    sample: Sample,
    place: int,
    probe: Probe,
    dtype: torch.dtype,
    device: torch.device,
    expected: Tensor | None = None,
    subset: Sequence[int] = (),
) -> str | None:
    """One backward, beside that of the reference or beside the right gradient.

    Args:
        subject: What is under check.
        sample: The sample.
        place: The input whose gradient is wrong.
        probe: What comes in.
        dtype: dtype of floating tensors.
        device: Where they lie.
        expected: The right gradient; None where there is none to compare with.
        subset: The inputs that require a gradient; the one alone by default.
    """
    flat, grads = sample.at(dtype, device), probe.at(dtype, device)
    return replay.gradient_replay(subject, sample, flat, place, grads, expected, subset=subset)
