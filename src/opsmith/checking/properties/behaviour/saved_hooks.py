"""Hooks on saved tensors: activations that are offloaded or compressed come back as other tensors."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from opsmith.checking.calls import SampleRun, copies
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.exceptions import Overlooking, refuse_own
from opsmith.checking.numerics.compare import describe_difference, differ_beyond_rounding
from opsmith.checking.property import Coverage, Findings, Property, covered_samples, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject

NAME = "saved_hooks"

WHERE = "where hooks pack what is saved (`torch.autograd.graph.saved_tensors_hooks`), as offloading does"


def _sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
    """Compare the gradients with those of a call whose saved tensors come back as contiguous copies."""
    for run in SampleRun.of(subject, sample):
        if not (run.argnums and run.call().open):
            continue
        right = None
        with Overlooking():  # what a backward raises in any case, `gradient` reports
            right = copies(run.call().backward())
        if right is None:
            continue
        coverage.ran += 1
        try:
            with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
                call = run.call()
            given = copies(call.backward())
        except Exception as error:
            refuse_own(error)
            message = f"{WHERE}, it raises {type(error).__name__}: {first_line(error)}"
            yield Failure(NAME, None, "raises", message, run.backward_location(), {"sample": str(sample)})
            return
        for at, (one, other) in enumerate(zip(right, given, strict=True)):
            if differ_beyond_rounding(one, other):
                label, evidence = sample.labels[run.argnums[at]], {"sample": str(sample)}
                message = (
                    f"the gradient of `{label}` is another one {WHERE}: {describe_difference(one, other)}"
                )
                yield Failure(NAME, label, UNKNOWN, message, run.backward_location(at), evidence)
                return


def _packed(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        return tensor.detach().clone()
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _unpacked(packed: Tensor) -> Tensor:
    return packed


SAVED_HOOKS = Property(
    NAME,
    "the gradients are the same where hooks pack the saved tensors",
    partial(covered_samples, NAME, _sample, "there is nothing to differentiate"),
    subset=True,
    sends_gradients=True,
)
