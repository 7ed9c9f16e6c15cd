"""Attention to a paged cache, in each dtype and layout, against torch's attention of each sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from random_layouts import contiguous, strided
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.ops import paged_attention

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Layout = Callable[[tuple[int, ...], torch.dtype], Tensor]


def by_heads(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory with the heads outside of the tokens, as many engines keep it."""
    *outer, inner, heads, dim = shape
    return contiguous((*outer, heads, inner, dim), dtype).transpose(-2, -3)


def of_a_layer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return contiguous((3, *shape), dtype)[1]


def one_by_one(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float | None = None
) -> Tensor:
    """Each sequence by torch's attention in float64 over its own tokens, one after the other."""
    results = []
    for row, blocks, length in zip(query.double(), table.tolist(), lengths.tolist(), strict=True):
        size = keys.shape[1]
        slots = [(blocks[at // size], at % size) for at in range(length)]
        picked = [
            torch.stack([cache[slot] for slot in slots] or [cache[0, 0] * 0]).double()
            for cache in (keys, values)
        ]
        key, value = (each.transpose(0, 1).repeat_interleave(len(row) // each.shape[1], 0) for each in picked)
        attended = F.scaled_dot_product_attention(row[:, None], key, value, scale=scale)[:, 0]
        results.append(attended if length else torch.zeros_like(attended))
    return torch.stack(results).to(query.dtype)


def call(dtype: torch.dtype, layout: Layout, groups: int) -> tuple[Tensor, ...]:
    """Four sequences of 0 to 9 tokens, in shuffled blocks; what no sequence uses is NaN."""
    lengths, size = torch.tensor([5, 0, 9, 4]), 4
    query = layout((4, 4, 5), dtype)
    keys, values = layout((9, size, groups, 5), dtype), layout((9, size, groups, 3), dtype)
    table, free = torch.full((4, 3), -7), torch.randperm(9).tolist()
    for sequence, length in enumerate(lengths.tolist()):
        for at in range(-(-length // size)):
            table[sequence, at] = free.pop()
            for cache in (keys, values):
                cache[table[sequence, at], max(0, length - at * size) :] = torch.nan
    for cache in (keys, values):
        cache[free] = torch.nan
    return query, keys, values, table, lengths


@pytest.mark.every(4)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("layout", [contiguous, strided, by_heads, of_a_layer])
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_values(dtype: torch.dtype, layout: Layout, groups: int) -> None:
    for _ in range(2):
        given = call(dtype, layout, groups)
        assert "kernel for cpu" in paged_attention.explain(*given).forward
        result = paged_attention(*given)
        assert result.dtype == dtype
        assert_close(result, one_by_one(*given))
        assert_close(paged_attention(*given, scale=0.3), one_by_one(*given, scale=0.3))


def test_the_reference_gives_the_same() -> None:
    query, keys, values, table, lengths = call(torch.float64, contiguous, 2)
    reference = paged_attention.specification.reference
    assert_close(
        reference(query, keys, values, table, lengths), one_by_one(query, keys, values, table, lengths)
    )


def test_threads_share_long_sequences() -> None:
    lengths, table = torch.tensor([640, 600]), torch.randperm(80).view(2, 40)
    given = torch.randn(2, 4, 32), torch.randn(80, 16, 4, 32), torch.randn(80, 16, 4, 32), table, lengths
    assert_close(paged_attention(*given), one_by_one(*given))


def test_large_scores() -> None:
    """The largest score is taken off before the exponential, which would overflow."""
    keys = torch.tensor([1000.0, -1000.0]).view(1, 2, 1, 1)
    values = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    result = paged_attention(torch.ones(1, 1, 1), keys, values, torch.tensor([[0]]), torch.tensor([2]))
    assert result.item() == 3


@pytest.mark.slow
def test_gradients() -> None:
    query, keys, values, table, lengths = (
        each.nan_to_num() if each.is_floating_point() else each for each in call(torch.float64, contiguous, 2)
    )
    given = query.requires_grad_(), keys.requires_grad_(), values.requires_grad_()
    assert torch.autograd.gradcheck(lambda *three: paged_attention(*three, table, lengths), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", [-1, 9])
def test_a_block_beyond_the_cache(block: int, dtype: torch.dtype) -> None:
    query, keys, values, table, lengths = call(dtype, contiguous, 2)
    table[2, 1] = block
    with pytest.raises((errors.KernelError, IndexError, RuntimeError), match=r"beyond the cache|out of ra"):
        paged_attention(query, keys, values, table, lengths)


@pytest.mark.parametrize("length", [-1, 13])
def test_a_length_beyond_the_blocks(length: int) -> None:
    query, keys, values, table, lengths = call(torch.float32, contiguous, 2)
    lengths[1] = length
    with pytest.raises((errors.KernelError, IndexError, RuntimeError), match=r"blocks hold 12|out of ra"):
        paged_attention(query, keys, values, table, lengths)


def test_heads_that_do_not_fit() -> None:
    query, keys, values, table, lengths = call(torch.float32, contiguous, 2)
    with pytest.raises((errors.KernelError, ValueError), match="3 heads, which is not a multiple of the"):
        paged_attention(query[:, :3], keys, values, table, lengths)
    with pytest.raises(errors.ShapeError):
        paged_attention(query, keys, values, table[:2], lengths)


@pytest.mark.slow
def test_check_passes() -> None:
    report = opsmith.check(paged_attention, effort="quick")
    assert report.passed, report
