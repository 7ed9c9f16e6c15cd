"""One sample in one dtype on one device: what the properties run the operator on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opsmith.checking.mistakes import refuse_own
from opsmith.checking.property import Note, first_line
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.checking.truth import Measure, Truth

WIDE = (torch.float64, torch.float32)
"""Every operator is checked in these; in narrower dtypes only where its reference runs in them."""

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A sample in a dtype on a device, and what is right there.

    Args:
        subject: What is under check.
        sample: The sample.
        dtype: dtype of its floating tensors.
        device: Where its tensors lie.
        truth: The right results.
    """

    subject: Subject
    sample: Sample
    dtype: torch.dtype
    device: torch.device
    truth: Truth

    def flat(self) -> list[Any]:
        """The flat arguments, fresh."""
        return self.sample.at(self.dtype, self.device)

    def __str__(self) -> str:
        return named(self.sample, self.dtype, self.device)


def named(sample: Sample, dtype: torch.dtype, device: torch.device) -> str:
    """A sample, dtype and device in words."""
    dtype_words = f" in {short(dtype)}" if sample.inexact else ""
    return f"{sample}{dtype_words} on {device.type}"


def cases(
    subject: Subject,
    sample: Sample,
    measure: Measure,
    dtypes: tuple[torch.dtype, ...],
    arguments: Callable[[torch.dtype, torch.device], list[Any]] | None = None,
) -> list[Case | Note]:
    """The cases that a sample makes, and a note for each that cannot be made.

    Args:
        subject: What is under check.
        sample: The sample.
        measure: What gives the truth.
        dtypes: dtypes of floating tensors; a sample without any makes one case.
        arguments: Arguments of what is measured; those of the sample by default.
    """
    found: list[Case | Note] = []
    if subject.single_precision:
        found.append(Note("dtypes other than float32 were left out: that is what it computes in"))
        dtypes = (torch.float32,)
    for dtype in dtypes if sample.inexact else dtypes[:1]:
        for device in subject.devices:
            found.append(_case(subject, sample, measure, dtype, device, arguments or sample.at))
    return found


def _case(
    subject: Subject,
    sample: Sample,
    measure: Measure,
    dtype: torch.dtype,
    device: torch.device,
    arguments: Callable[[torch.dtype, torch.device], list[Any]],
) -> Case | Note:
    if not sample.takes(dtype):
        return Note(f"{short(dtype)} was left out where a sample is complex: it has no complex form")
    try:
        flat = arguments(dtype, device)
    except (RuntimeError, TypeError) as error:
        return Note(
            f"{short(dtype)} was left out on {device.type}, which does not have it: {first_line(error)}"
        )
    try:
        return Case(subject, sample, dtype, device, measure.truth(flat, dtype))
    except (RuntimeError, TypeError) as error:
        refuse_own(error)
        if dtype in WIDE:
            raise
        return Note(f"{short(dtype)} was left out: the reference does not run in it: {first_line(error)}")


def short(dtype: torch.dtype) -> str:
    """A dtype in a message."""
    return str(dtype).removeprefix("torch.")
