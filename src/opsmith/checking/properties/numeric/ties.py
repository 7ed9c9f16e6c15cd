"""Ties: inputs that belong together in the author's samples, so that a gradient is right there alone.

A class may take a kernel and its flip, or a matrix and its null vector, and use one for the other: its
gradients are right wherever the caller keeps the relation, and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.causes import CAUSES
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.properties.numeric.gradient_truth import Backward, RightGradients
from opsmith.checking.report import Failure
from opsmith.checking.samples.domain import are_same
from opsmith.checking.samples.grad_outputs import plain_grad_outputs
from opsmith.checking.samples.sample import Sample, shown_sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.judging.compare import is_close, largest_magnitude
from opsmith.judging.tensors import CPU, is_inexact

APART = 1e-2
"""Relative move by which tied inputs come apart."""

SAME = 1e-6
"""Share of the largest element to which a gradient is the right one; its square if the right one is zero."""


def where_tied(finding: Failure, subject: Subject, moved: str | None = None) -> Failure:
    """A finding on numbers, as one in strained circumstances if tied inputs alone make it.

    It is about the gradient by one of them, or it is seen where they have come apart.

    Args:
        moved: Label of the input that was changed; by default those that differ from the author's sample.
    """
    sample = shown_sample(str(finding.evidence.get("sample", "")), subject.samples)
    if not CAUSES[finding.cause].numeric or sample is None:
        return finding
    concerned = {finding.input, moved}
    if moved is None and sample.change is not None:
        pairs = zip(sample.labels, sample.flat, sample.change.of.flat, strict=True)
        concerned |= {label for label, now, then in pairs if is_inexact(now) and not are_same([now], [then])}
    tied = tied_inputs(subject) if concerned != {None} else frozenset()
    if not concerned & tied:
        return finding
    names = " and ".join(f"`{label}`" for label in sorted(tied))
    words = f"{names} belong together in your samples: where one of them moves alone, gradients are wrong"
    return replace(finding, given="strained", message=f"{finding.message}; {words}")


def tied_inputs(subject: Subject) -> frozenset[str]:
    """Labels of the inputs that belong together: each moved alone makes a gradient wrong that was right.

    One input is tied to none: a gradient that is right where `w` sums to one, and nowhere else, is wrong.
    """
    sample = next((each for each in subject.samples if not each.origin), None)
    if sample is None:
        return frozenset()
    return subject.once("tied inputs", sample, partial(_tied, subject, sample))


def _tied(subject: Subject, sample: Sample) -> frozenset[str]:
    right = {*sample.labels} - _wrong(subject, sample)
    generator = subject.generator()
    apart: set[str] = set()
    for argnum in sample.inexact:
        value = sample.flat[argnum]
        if value.numel() < 2 or bool((value == value.flatten()[0]).all()):
            continue  # what is constant is no relation
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        moved = (value * (1 + APART * noise)).to(value.dtype)
        if _wrong(subject, replace(sample, flat=sample.with_value(argnum, moved), copies={})) & right:
            apart.add(sample.labels[argnum])
    return frozenset(apart) if len(apart) > 1 else frozenset()


def _wrong(subject: Subject, sample: Sample) -> set[str]:
    """Labels of the inputs whose gradient is wrong for a sample, or cannot be compared."""
    with Overlooking(), without_warnings():
        rights, grads = RightGradients(subject, sample), plain_grad_outputs(subject, sample)
        found = Backward(rights)(grads.beside(sample)(torch.float64, CPU))
        rated = [rights.one(at, grads) for at in rights.argnums]
        every = [each.answer.value if each.trusted else each.numerical.values for each in rated]
        present = [each.nan_to_num(0.0, 0.0, 0.0) for each in every if each is not None]
        floor = SAME**2 * max(map(largest_magnitude, present), default=0.0)
        return {
            sample.labels[at]
            for at, got, right in zip(rights.argnums, found, every, strict=True)
            if right is not None and not _agree(got, right, floor)
        }
    return {*sample.labels}


def _agree(got: Tensor, right: Tensor, floor: float) -> bool:
    """Return True if every finite element is the same: what an ill-conditioned bound excuses tells no tie."""
    known = right.isfinite()
    numbers = right.masked_fill(~known, 0.0)
    bound = floor + SAME * largest_magnitude(numbers)
    return bool((is_close(got.to(right), numbers, bound) | ~known).all())
