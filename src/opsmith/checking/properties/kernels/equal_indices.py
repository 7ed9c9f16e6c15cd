"""Equal indices that a check derives where the samples have distinct ones, as the slots of a cache are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.generate_like import WHOLE
from opsmith.judging.tensors import is_inexact

ELEMENTS = 64
"""Most elements of a tensor of which it is tried whether a result depends on them."""


def keeps_one(subject: Subject, sample: Sample, flat: Sequence[Any]) -> bool:
    """Return True if a call has equal indices, as no sample has, and the reference keeps one of their values.

    The order of the writes decides then, and an author may exclude such calls, as for the slots of a cache.
    The values that are lost change no result; where a reference adds them up, none is lost.

    Args:
        subject: The subject of the check.
        sample: The sample, maybe one that is derived.
        flat: Flat arguments of the call.
    """
    shapes = [_shape(value) for value in flat]
    own = next(
        (each for each in subject.samples if not each.origin and [*map(_shape, each.flat)] == shapes), None
    )
    if own is None or not any(
        _repeats(here) and not _repeats(given) for here, given in zip(flat, own.flat, strict=True)
    ):
        return False
    given = own.in_double()
    wide = [each.double() if is_inexact(each) and not each.is_complex() else each for each in flat]
    lost, before = (_lost(subject, sample, each) for each in (wide, given))
    return any(now > once for now, once in zip(lost, before, strict=True))


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _repeats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in WHOLE and len(value.unique()) < value.numel()


def _lost(subject: Subject, sample: Sample, flat: Sequence[Any]) -> list[int]:
    """Return for each floating tensor how many of some of its elements change no result."""
    try:
        results = subject.reference(sample, _copies(flat))
        return [
            sum(
                _is_lost(subject, sample, flat, argnum, at, results)
                for at in range(0, flat[argnum].numel(), -(-flat[argnum].numel() // ELEMENTS))
            )
            if flat[argnum].numel()
            else 0
            for argnum in sample.inexact
        ]
    except Exception as error:
        refuse_own(error)
        return [0] * len(sample.inexact)  # nothing is known


def _is_lost(
    subject: Subject, sample: Sample, flat: Sequence[Any], argnum: int, at: int, results: Sequence[Any]
) -> bool:
    changed = _copies(flat)
    changed[argnum].view(-1)[at] += 1
    return all(map(_same, subject.reference(sample, changed), results))


def _same(one: Any, other: Any) -> bool:
    return not isinstance(one, Tensor) or torch.equal(one, other)


def _copies(flat: Sequence[Any]) -> list[Any]:
    return [each.contiguous().clone() if isinstance(each, Tensor) else each for each in flat]
