"""The fake kernel tells the form of the real results: tracing, compiling and exporting build on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.case import NARROW, WIDE, named, short
from opsmith.checking.fake_kernel import compare_fake, compare_symbolic
from opsmith.checking.mistakes import refuse_own
from opsmith.checking.property import Findings, Note, Property, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.checking.variations import form_of

NAME = "fake"


def run(subject: Subject) -> Findings:
    """Compare the form on fake tensors with the real one: in each dtype, transposed, at symbolic sizes."""
    forms: set[tuple[Any, ...]] = set()

    def look(subject: Subject, sample: Sample) -> Findings:
        form = form_of(sample)
        if not sample.origin or form not in forms:  # other numbers alone are as good as none here
            yield from _sample(subject, sample)
        forms.add(form)

    yield from each_sample(NAME, subject, look)


SYMBOLIC = {"quick": 0, "default": 1, "thorough": 60}
"""How many samples are run at symbolic sizes."""


def _sample(subject: Subject, sample: Sample) -> Findings:
    for what, case, flat in _cases(subject, sample):
        try:
            results = subject.call(sample, flat)
        except Exception as error:
            refuse_own(error)
            yield Note(f"{what} was left out, since it does not run there: {first_line(error)}")
            continue
        found = [*compare_fake(NAME, subject, sample, flat, results, case)]
        yield from found
        if any(isinstance(finding, Failure) for finding in found):
            return  # what is known to be wrong needs no second message
    if sample.position < SYMBOLIC[subject.effort.name]:
        flat = sample.at()
        try:
            results = subject.call(sample, flat)
        except Exception as error:
            refuse_own(error)
            return  # said above
        yield from compare_symbolic(NAME, subject, sample, flat, results, str(sample))


def _cases(subject: Subject, sample: Sample) -> Iterator[tuple[str, str, list[Any]]]:
    """Arguments to try: what they are, the whole case in words, and the arguments themselves.

    A form depends on dtypes much as in every other sample: all of them are tried in the first one alone.
    """
    every = subject.effort.name == "thorough" or not sample.position
    for device in subject.devices:
        for dtype in _dtypes(subject) if sample.inexact and every else ():
            if sample.takes(dtype):
                yield short(dtype), named(sample, dtype, device), sample.at(dtype, device)
        if not (sample.inexact and every):
            yield str(sample), f"{sample} on {device.type}", sample.at(device=device)
    if sample.origin or (sample.position > 1 and not every):
        return
    flat = [_turned(value) for value in sample.at()]
    yield f"{sample} transposed in memory", f"{sample}, transposed in memory", flat


def _dtypes(subject: Subject) -> tuple[torch.dtype, ...]:
    if subject.single_precision:
        return (torch.float32,)
    return (torch.float32, torch.bfloat16) if subject.effort.name == "quick" else (*WIDE, *NARROW)


def _turned(value: Any) -> Any:
    """The same numbers, in another order in memory."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    return value.transpose(-1, -2).contiguous().transpose(-1, -2)


FAKE = Property(NAME, "the fake kernel tells the form of the real results", run, varied=True)
