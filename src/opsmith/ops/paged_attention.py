"""Attention of one new token of each sequence to a paged cache, which is read without a copy.

Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, arXiv:2309.06180, equations 1 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import opsmith


@opsmith.operator(
    "opsmith::paged_attention",
    shapes="query: N H D, key_cache: blocks S G D, value_cache: blocks S G E, block_table: N B, lengths: N "
    "-> N H E",
)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Compute softmax(scale q Kᵀ) V for one query of each sequence, with K and V from a paged cache.

    Args:
        query: [N, H, D], of N sequences and H heads, floating. 16 bits are computed in float32.
        key_cache: [blocks, S, G, D], with S slots in a block and G heads; G divides H, and H / G neighbouring
            heads of the query share a head of the cache.
        value_cache: [blocks, S, G, E].
        block_table: [N, B], int64, the blocks of each sequence in order. Entries that a sequence does not
            need are not read, and may have any value.
        lengths: [N], int64, tokens of each sequence in the cache, at most B S. For a length of 0 the result
            is zeros.
        scale: Factor of the scores; 1/√D if None.

    Returns:
        [N, H, E], in the dtype of the query.

    Raises:
        ShapeError: If the shapes do not fit.
        KernelError, IndexError, ValueError: If G does not divide H, a block is beyond the cache, or there
            are more tokens than the blocks hold.

    Example:
        >>> import torch
        >>> keys, values = torch.zeros(2, 2, 1, 1), torch.tensor([1.0, 2.0, 3.0, 4.0]).view(2, 2, 1, 1)
        >>> blocks, lengths = torch.tensor([[1, 0]]), torch.tensor([3])
        >>> paged_attention(torch.zeros(1, 1, 1), keys, values, blocks, lengths) * 3
        tensor([[[8.]]])
    """
    heads, size, groups = query.shape[1], key_cache.shape[1], key_cache.shape[2]
    if groups == 0 or heads % groups:
        raise ValueError(
            f"the query has {heads} heads, which is not a multiple of the cache's {groups} heads"
        )
    room = torch.arange(block_table.shape[1] * size + 1, device=lengths.device)
    lengths = room.index_select(0, lengths)  # raises for lengths that are negative, or exceed the room
    there = room[:-1] < lengths[:, None]
    needed = torch.where(there[:, ::size], block_table, 0)
    keys, values = (
        cache.index_select(0, needed.flatten())  # raises for negative blocks, unlike `cache[needed]`
        .reshape(*there.shape, *cache.shape[2:])
        .masked_fill(~there[..., None, None], 0)  # free slots may contain any numbers, also NaN
        .repeat_interleave(heads // groups, 2)
        for cache in (key_cache, value_cache)
    )
    if query.element_size() < 4:
        keys, values = keys.float(), values.float()
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("nhd,nphd->nhp", query.to(keys.dtype), keys) * factor
    weights = scores.masked_fill(~there[:, None], -torch.inf).softmax(-1)
    weights = weights.masked_fill(~there[:, None], 0)  # NaN if there is no token
    return torch.einsum("nhp,nphe->nhe", weights, values).to(query.dtype)


paged_attention.kernel(
    "cpu",
    cpp_file="paged_attention.cpp",
    dtypes=[torch.float16, torch.bfloat16, torch.float32, torch.float64],
)


@paged_attention.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for blocks, size, heads, groups, dim, table, lengths, scale in (
        (4, 3, 2, 2, 5, [[2, 0], [3, 1]], [4, 6], None),
        (3, 2, 4, 2, 3, [[2, -1], [1, 0]], [2, 3], 0.5),
        (2, 4, 3, 1, 4, [[1]], [3], None),
        (2, 2, 1, 1, 2, [[0], [1]], [0, 1], None),
    ):
        yield (
            make(len(lengths), heads, dim),
            make(blocks, size, groups, dim),
            make(blocks, size, groups, dim + 1),
            torch.tensor(table, device=make.device),
            torch.tensor(lengths, device=make.device),
            scale,
        )
