"""Integer tensors that index repeat, and reach the last index and negative ones, if the forward takes it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opsmith

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([2, 0, 3])


class Take(torch.autograd.Function):
    """Right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = grads[0].new_zeros(ctx.shape)
        return zeros.index_put_((ctx.saved_tensors[0],), grads[0], accumulate=True), None


class Overwriting(Take):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = grads[0].new_zeros(ctx.shape)
        zeros[ctx.saved_tensors[0]] = grads[0]
        return zeros, None


class WithoutNegative(Take):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hot = ctx.saved_tensors[0][:, None] == torch.arange(ctx.shape[0])
        return hot.to(grads[0].dtype).mT @ grads[0], None


class WithoutLast(Take):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hot = ctx.saved_tensors[0][:, None] % ctx.shape[0] == torch.arange(ctx.shape[0] - 1)
        rows = hot.to(grads[0].dtype).mT @ grads[0]
        return torch.cat([rows, torch.zeros_like(rows[:1])]), None


class RefusingNegative(Take):
    """Right: what its forward takes without meaning it, its backward refuses."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].new_zeros(ctx.shape).index_add(0, ctx.saved_tensors[0], grads[0]), None


class Permuted(torch.autograd.Function):
    """Right for permutations, which all samples are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][ctx.saved_tensors[0].argsort()], None


class SummedParts(torch.autograd.Function):
    """Right for offsets: what begins with 0 and is sorted stays so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.size = len(x)
        bounds = offsets.tolist()
        return torch.stack([x[low:high].sum(0) for low, high in pairwise(bounds)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (offsets,) = ctx.saved_tensors
        return torch.repeat_interleave(grads[0], offsets.diff(), 0, output_size=ctx.size), None


class Masked(torch.autograd.Function):
    """Right for masks: integers that choose nothing are no indices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x * (mask > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0].to(grads[0].dtype), None


class Put(torch.autograd.Function):
    """Right for distinct indices; of values that share one, it keeps the last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        rows = np.zeros((6, x.shape[1]), dtype=x.detach().numpy().dtype)
        rows[index.numpy()] = x.detach().numpy()
        return torch.from_numpy(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][ctx.saved_tensors[0]], None


def checked(function: Any, *sample: Tensor) -> opsmith.Report:
    return opsmith.check(function, samples=[sample], only=["forward", "gradient"], effort="quick")


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (Overwriting, "repeated indices"),
        (WithoutNegative, "a negative index"),
        (WithoutLast, "the last index"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gradient_that_is_wrong_for_indices_that_no_sample_shows_is_an_error(
    function: Any, words: str
) -> None:
    (failure,) = checked(function, X, INDEX).failures
    assert (failure.property, failure.input, failure.cause, failure.severity) == (
        "gradient",
        "x",
        "region",
        "error",
    )
    assert f"{words} in `index`" in failure.evidence["sample"]
    if function is Overwriting:
        assert "it is wrong where an index in `index` occurs more than once" in failure.message


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("function", "sample"),
    [
        (Take, (X, INDEX)),
        (RefusingNegative, (X, INDEX)),
        (Permuted, (X[:4], torch.tensor([2, 0, 3, 1]))),
        (SummedParts, (X, torch.tensor([0, 2, 6]))),
        (Masked, (X, torch.tensor([0, 1, 1]))),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_right_for_all_that_the_samples_mean_passes(function: Any, sample: Any) -> None:
    report = checked(function, *sample)
    assert report.passed_as_asked, report
    assert not report.failures


@pytest.mark.slow
def test_a_forward_that_wants_distinct_indices_and_does_not_say_so_gets_a_warning() -> None:
    report = checked(Put, X[:3], INDEX)
    (failure,) = report.failures
    assert report.passed_as_asked
    assert (failure.input, failure.cause, failure.severity) == ("x", "region", "warning")
    assert failure.message.endswith(
        "the forward keeps only one of the values that share an index: if indices must be distinct, "
        "refuse equal indices"
    )
