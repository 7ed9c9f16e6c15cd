"""Kernels that are wrong for one structure of indices, lengths or masks, which random numbers seldom have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith

GENERATOR = torch.Generator().manual_seed(0)
Fault = Callable[[Tensor, Tensor], Any]


def rows_in_order(x: Tensor, index: Tensor) -> Tensor:
    return x[index].cumsum(0)


def padded_sums(x: Tensor, lengths: Tensor) -> Tensor:
    return (x * (torch.arange(x.shape[1]) < lengths[:, None])).sum(1)


def masked_means(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


SAMPLES = {
    rows_in_order: [
        (drawn(6, 3), torch.tensor([1, 4, 2, 5])),
        (drawn(7, 2), torch.tensor([3, 0, 5, 2, 1])),
    ],
    padded_sums: [(drawn(3, 5), torch.tensor([2, 5, 3])), (drawn(2, 4), torch.tensor([1, 4]))],
    masked_means: [(drawn(3, 5), drawn(3, 5) > -0.3), (drawn(2, 4), drawn(2, 4) > -0.3)],
}

FAULTS: dict[str, tuple[Callable[..., Tensor], Fault]] = {
    "repeated indices": (rows_in_order, lambda x, index: len(index.unique()) < len(index)),
    "one index everywhere": (rows_in_order, lambda x, index: len(index) > 2 and len(index.unique()) == 1),
    "rising indices": (rows_in_order, lambda x, index: len(index) > 2 and (index.diff() > 0).all()),
    "falling indices": (rows_in_order, lambda x, index: len(index) > 2 and (index.diff() < 0).all()),
    "the first index first": (rows_in_order, lambda x, index: len(index) > 2 and index[0] == 0),
    "the last index twice": (rows_in_order, lambda x, index: (index == len(x) - 1).sum() > 1),
    "a permutation": (rows_in_order, lambda x, index: len(index.unique()) == len(index) == len(x) > 2),
    "a length of 0": (padded_sums, lambda x, lengths: (lengths == 0).any()),
    "full lengths": (padded_sums, lambda x, lengths: len(x) > 1 and (lengths == x.shape[1]).all()),
    "an empty row": (masked_means, lambda x, mask: mask.numel() > 2 and not mask.any(-1).all()),
    "nothing": (masked_means, lambda x, mask: mask.numel() > 2 and not mask.any()),
    "everything": (masked_means, lambda x, mask: mask.numel() > 2 and mask.all()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_that_is_wrong_for_one_structure_is_found(name: str) -> None:
    reference, is_wrong = FAULTS[name]
    operator = opsmith.operator(f"structures::{name.replace(' ', '_')}")(reference)

    @operator.kernel("cpu")
    def _(x: Tensor, chosen: Tensor) -> Tensor:
        return reference(x, chosen) + float(bool(is_wrong(x, chosen)))

    report = opsmith.check(operator, samples=SAMPLES[reference], only=["forward"])
    assert [each.cause for each in report.errors] == ["kernel-mismatch"], report


@pytest.mark.parametrize("reference", SAMPLES, ids=lambda each: each.__name__)
def test_what_is_right_passes(reference: Callable[..., Tensor]) -> None:
    operator = opsmith.operator(f"structures::right_{reference.__name__}")(reference)
    report = opsmith.check(operator, samples=SAMPLES[reference], only=["forward", "gradient"])
    assert not report.failures, report
