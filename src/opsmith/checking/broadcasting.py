"""Smaller shapes of arguments that the samples show to be broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from opsmith.checking.mistakes import Overlooking
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.calls import tensors_in


def broadcasts(subject: Subject, sample: Sample) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Places of arguments, each with a shape that broadcasts to what it had.

    Only for an operator whose results have the shape that its arguments broadcast to, in every sample: others
    may accept a size of 1 and mean something else. And only what a sample shows of an argument: a dimension
    of 1 beside a larger one, fewer dimensions than the result has, none at all.
    """
    if not all(_pointwise(subject, each) for each in subject.samples):
        return
    for place, (label, value) in enumerate(zip(sample.labels, sample.flat, strict=True)):
        if not isinstance(value, Tensor) or not value.numel():
            continue
        shown = [(own.shape, whole) for own, whole in _forms(subject.samples, label)]
        ranks = {len(own) for own, _ in shown}
        if any(len(own) < len(whole) for own, whole in shown) and len(ranks) > 1:
            for dropped in range(1, value.dim() + 1):
                yield place, tuple(value.shape[dropped:])
        if any(_stretched(own, whole) for own, whole in shown):
            for at, size in enumerate(value.shape):
                if size > 1:
                    yield place, (*value.shape[:at], 1, *value.shape[at + 1 :])
    tensors = [place for place, value in enumerate(sample.flat) if isinstance(value, Tensor)]
    if len(tensors) == 1:
        (place,) = tensors
        ranks = {own.dim() for own, _ in _forms(subject.samples, sample.labels[place])}
        if len(ranks) > 1 and sample.flat[place].dim():
            yield place, ()


def _forms(samples: Sequence[Sample], label: str) -> list[tuple[Tensor, tuple[int, ...]]]:
    """An argument of each sample that has it, with the shape that all arguments broadcast to."""
    return [
        (value, _whole(sample))
        for sample in samples
        for name, value in zip(sample.labels, sample.flat, strict=True)
        if name == label and isinstance(value, Tensor)
    ]


def _stretched(own: Sequence[int], whole: Sequence[int]) -> bool:
    return any(mine == 1 and full > 1 for mine, full in zip(reversed(own), reversed(whole), strict=False))


def _whole(sample: Sample) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(value.shape for value in tensors_in(list(sample.flat)))))


def _pointwise(subject: Subject, sample: Sample) -> bool:
    """Whether every result has the shape that all arguments broadcast to."""
    try:
        whole = _whole(sample)
    except RuntimeError:  # they do not broadcast
        return False
    # Suppressed, since the properties report what it raises for the author's own sample.
    with Overlooking(), torch.no_grad():
        results = subject.reference(sample, sample.at())
        return all(tuple(result.shape) == whole for result in tensors_in(list(results)))
    return False
