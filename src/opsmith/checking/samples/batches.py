"""Batches made of a sample: several examples of it side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.samples.sample import Sample, is_inexact, replica
from opsmith.checking.subject import Subject


def drawn(value: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """A tensor, and others drawn from its values, so that they lie where the operator is defined."""
    flat, elements = value.reshape(-1), value.numel()
    draws = [torch.randint(max(elements, 1), (elements,), generator=generator) for _ in range(count - 1)]
    return [value, *(flat[draw].reshape(value.shape) for draw in draws)]


def scaled(value: Tensor, count: int) -> list[Tensor]:
    """A tensor, and others of its form: matrices that must be symmetric or positive stay so."""
    if not is_inexact(value):
        return [value] * count
    return [value * (1 - 0.125 * step) for step in range(count)]


def batch_of(
    subject: Subject, sample: Sample, places: Sequence[int], size: int, dtype: torch.dtype | None
) -> list[list[Any]]:
    """The flat arguments of some examples, that differ at some places.

    The values of a sample are drawn again for each example; where that is no input of the operator (it
    raises, or gives no finite results where the sample does), the sample is scaled.

    Args:
        subject: What is under check.
        sample: The sample; the first example.
        places: The arguments in which the examples differ.
        size: How many examples.
        dtype: dtype of floating tensors; their own by default.
    """
    flat = sample.at(dtype)
    finite = all_finite(subject.call(sample, replicas(flat)))
    generator = subject.generator()
    columns = {place: _precise(drawn(flat[place], size, generator)) for place in places}
    rows = _rows(flat, columns, size)
    try:
        if not finite or all(all_finite(subject.call(sample, replicas(row))) for row in rows):
            return rows
    except Exception as error:
        refuse_own(error)  # what was drawn is no input of it, and the sample itself is
    return _rows(flat, {place: scaled(flat[place], size) for place in places}, size)


def _precise(values: Sequence[Tensor]) -> list[Tensor]:
    """The values but for the first in numbers that need all digits: authors give short ones."""
    first, *others = values
    if first.dtype not in (torch.float64, torch.complex128):
        return [*values]
    return [first, *(value * (1 - 2.0**-27) for value in others)]


def _rows(flat: Sequence[Any], columns: Mapping[int, Sequence[Tensor]], size: int) -> list[list[Any]]:
    return [
        [columns[place][row] if place in columns else value for place, value in enumerate(flat)]
        for row in range(size)
    ]


def replicas(flat: Sequence[Any]) -> list[Any]:
    """The values, every tensor fresh."""
    return [replica(value) for value in flat]


def all_finite(results: Sequence[Any]) -> bool:
    """Whether no floating result is nan or infinite."""
    return all(bool(each.isfinite().all()) for each in results if is_inexact(each))


def side_by_side(rows: Sequence[Sequence[Any]], dims: Mapping[int, int]) -> list[Any]:
    """The flat arguments of a batch.

    Args:
        rows: Those of each example.
        dims: For each argument that has a batch, its dimension.
    """
    return [
        torch.stack([row[place] for row in rows], dims[place]) if place in dims else value
        for place, value in enumerate(rows[0])
    ]


def without_examples(flat: Sequence[Any], dims: Mapping[int, int]) -> list[Any]:
    """The flat arguments of a batch of none, each of which would be like these."""
    return [
        value.unsqueeze(dims[place]).narrow(dims[place], 0, 0) if place in dims else value
        for place, value in enumerate(flat)
    ]


def working_dtype(subject: Subject, sample: Sample) -> torch.dtype | None:
    """The widest dtype in which the operator takes a sample; None for its own, where no other does."""
    candidates = (torch.float32,) if subject.single_precision else (torch.float64, torch.float32)
    for dtype in candidates:
        try:
            subject.call(sample, sample.at(dtype))
        except Exception as error:
            refuse_own(error)
            continue  # the properties of results report what it raises
        return dtype
    return None


def own_dtype(sample: Sample) -> torch.dtype:
    """The dtype of a sample's floating tensors, the first of them; float64 where there is none."""
    for place in sample.inexact:
        value = sample.flat[place]
        found: torch.dtype = value.dtype.to_real() if value.is_complex() else value.dtype
        return found
    return torch.float64
