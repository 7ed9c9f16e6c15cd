"""Beginning of a decode step: the slot of each sequence's new token, and its row of the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import opsmith


@opsmith.operator(
    "opsmith::begin_decode_step",
    mutates=["x", "residual", "positions", "slots", "lengths"],
    shapes="x: N W, residual: N W, positions: N, slots: N, lengths: N, tokens: N, embedding: V W, "
    "block_table: N B ->",
)
def begin_decode_step(
    x: Tensor,
    residual: Tensor,
    positions: Tensor,
    slots: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    embedding: Tensor,
    block_table: Tensor,
    block_size: int,
) -> None:
    """Make room for one more token of each sequence, and write the inputs of the first block.

    Args:
        x: [N, W], becomes the embedding's rows of the tokens.
        residual: [N, W], becomes zeros, to which the first block adds x.
        positions: [N], int64, becomes the lengths before the step.
        slots: [N], int64, becomes the slot of the position in the paged cache.
        lengths: [N], int64, each is increased by one.
        tokens: [N], int64, from 0 to V - 1.
        embedding: [V, W], of the dtype of x.
        block_table: [N, B], int64, the blocks of each sequence in order; negative if there is no block.
        block_size: Slots in a block, S. A length is from 0 to B S - 1.

    Raises:
        ShapeError, MutationError: If a shape is wrong, or a tensor cannot be written.
        KernelError, IndexError, RuntimeError: If a token is not in the embedding, or a sequence has no free
            slot in its blocks.

    Example:
        >>> import torch
        >>> x, residual, numbers = torch.empty(1, 1), torch.empty(1, 1), torch.zeros(3, 1, dtype=torch.int64)
        >>> positions, slots, lengths = numbers.unbind()
        >>> lengths += 5
        >>> table, token = torch.tensor([[7, 2]]), torch.tensor([1])
        >>> begin_decode_step(x, residual, positions, slots, lengths, token, torch.ones(2, 1), table, 4)
        >>> x, positions, slots, lengths
        (tensor([[1.]]), tensor([5]), tensor([9]), tensor([6]))
    """
    new = lengths.clone()
    block = block_table.gather(1, new[:, None] // block_size)[:, 0]
    zero = block.new_zeros(1).index_select(0, block.sign().clamp(max=0))  # refuses negative blocks
    rows = embedding.index_select(0, tokens)
    positions.copy_(new)
    slots.copy_(block * block_size + new % block_size + zero)
    lengths.add_(1)
    x.copy_(rows)
    residual.zero_()


begin_decode_step.kernel(
    "cpu", cpp_file="step.cpp", dtypes=[torch.float16, torch.bfloat16, torch.float32, torch.float64]
)


@begin_decode_step.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for width, vocabulary, tokens, lengths, table, size in (
        (5, 3, [2, 0], [4, 3], [[2, 1], [4, 0]], 4),
        (1, 2, [1], [0], [[3]], 1),
    ):
        count = len(tokens)
        yield (
            make(count, width),
            make(count, width),
            *(torch.zeros(count, dtype=torch.int64, device=make.device) for _ in range(2)),
            torch.tensor(lengths, device=make.device),
            torch.tensor(tokens, device=make.device),
            make(vocabulary, width),
            torch.tensor(table, device=make.device),
            size,
        )
