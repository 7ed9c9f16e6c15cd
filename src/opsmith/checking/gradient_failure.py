"""A wrong gradient, shown again by a few lines."""

from __future__ import annotations

import torch

from opsmith.checking.probes import Probe
from opsmith.checking.replay import call_code, replay, visible_code
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject


def gradient_replay(
    subject: Subject, sample: Sample, place: int, probe: Probe, dtype: torch.dtype, device: torch.device
) -> str | None:
    """One backward of the operator and of the reference, for an operator that has a single visible result."""
    name = sample.names[place]
    if (
        not subject.specification.schema.always_tensors
        or len(subject.specification.schema.visible) > 1
        or subject.specification.opaque
        or sample.labels[place] != name
    ):
        return None
    flat = sample.at(dtype, device)
    flat[place].requires_grad_()
    got, expected = visible_code(subject, 0, call_code(sample))
    (grad,) = probe.at(dtype, device)
    assert grad is not None
    ending = [
        f"(got,) = torch.autograd.grad({got}, {name}, grad)",
        f"(expected,) = torch.autograd.grad({expected}, {name}, grad)",
        "torch.testing.assert_close(got, expected)",
    ]
    return replay(subject, sample, flat, ending, {"grad": grad})
