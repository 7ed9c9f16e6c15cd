"""Batches of several examples made from one sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.judging.tensors import is_inexact, replica


def _drawn(value: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """Return a tensor, and tensors drawn from its values, which so stay in the operator's domain.

    The drawn values are scaled, so that they need all digits, unlike the short numbers of authors.
    """
    flat, elements = value.reshape(-1), value.numel()
    draws = [torch.randint(max(elements, 1), (elements,), generator=generator) for _ in range(count - 1)]
    if value.dtype in (torch.float64, torch.complex128):
        flat = flat * (1 - 2.0**-27)
    return [value, *(flat[draw].reshape(value.shape) for draw in draws)]


def scaled(value: Tensor, count: int) -> list[Tensor]:
    """Return a tensor, and scaled copies of it, which stay symmetric or positive."""
    if not is_inexact(value):
        return [value] * count
    return [value * (1 - 0.125 * step) for step in range(count)]


def batch_of(
    subject: Subject, sample: Sample, argnums: Sequence[int], size: int, dtype: torch.dtype | None
) -> list[list[Any]]:
    """Return the flat arguments of some examples, which differ at some positions.

    The values of the sample are drawn again for each example. If the operator rejects them (it raises, or
    returns results that are not finite where the sample's are), the sample is scaled instead.

    Args:
        sample: The sample, which is the first example.
        argnums: Positions of the arguments in which the examples differ.
        size: Number of examples.
        dtype: dtype of floating tensors; each tensor's own by default.
    """
    flat = sample.at(dtype)
    finite = all_finite(subject.call(sample, replicas(flat)))
    generator = subject.generator()
    columns = {argnum: _drawn(flat[argnum], size, generator) for argnum in argnums}
    rows = _rows(flat, columns, size)
    with Overlooking():  # the drawn values may be rejected, but the sample itself is not
        if not finite or all(all_finite(subject.call(sample, replicas(row))) for row in rows):
            return rows
    return _rows(flat, {argnum: scaled(flat[argnum], size) for argnum in argnums}, size)


def _rows(flat: Sequence[Any], columns: Mapping[int, Sequence[Tensor]], size: int) -> list[list[Any]]:
    return [
        [columns[argnum][row] if argnum in columns else value for argnum, value in enumerate(flat)]
        for row in range(size)
    ]


def replicas(flat: Sequence[Any]) -> list[Any]:
    """Copy the values; every tensor is copied into fresh memory."""
    return [replica(value) for value in flat]


def all_finite(results: Sequence[Any]) -> bool:
    """Return True if every floating result is finite."""
    return all(bool(each.isfinite().all()) for each in results if is_inexact(each))


def batched(rows: Sequence[Sequence[Any]], dims: Mapping[int, int]) -> list[Any]:
    """Stack the flat arguments of the examples, in fresh memory.

    Args:
        rows: Flat arguments of each example.
        dims: Batch dimension of each argument that has one.
    """
    return [
        torch.stack([row[argnum] for row in rows], dims[argnum]) if argnum in dims else replica(value)
        for argnum, value in enumerate(rows[0])
    ]


def working_dtype(subject: Subject, sample: Sample) -> torch.dtype | None:
    """Return the widest dtype in which the operator runs a sample; None for the sample's own."""
    candidates = (torch.float32,) if subject.single_precision else (torch.float64, torch.float32)
    for dtype in candidates:
        with Overlooking():  # `forward` reports its exceptions
            subject.call(sample, sample.at(dtype))
            return dtype
    return None


def own_dtype(sample: Sample) -> torch.dtype:
    """Return the dtype of a sample's first floating tensor; float64 if there is none."""
    return next((sample.flat[argnum].dtype.to_real() for argnum in sample.inexact), torch.float64)
