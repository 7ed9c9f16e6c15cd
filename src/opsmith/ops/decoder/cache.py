"""Paged cache of a decoder: the memory of all sequences, the blocks of each, and the buffers of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opsmith.ops.decoder.sizes import DecoderSizes


class DecodeBuffers:
    """Memory of one step for N sequences: the intermediate results from the tokens to the logits.

    Args:
        sizes: Sizes of the decoder.
        sequences: N.
        dtype: Dtype of the activations.
        device: Device of the memory.
    """

    def __init__(
        self, sizes: DecoderSizes, sequences: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(sequences, *shape, dtype=dtype, device=device)

        self.x = empty(sizes.width)
        self.residual = empty(sizes.width)
        self.qkv = empty(3 * sizes.heads, sizes.head_dim)
        self.attention = empty(sizes.heads, sizes.head_dim)
        self.hidden = empty(2 * sizes.hidden)
        self.slots = torch.empty(sequences, dtype=torch.int64, device=device)
        self.positions = torch.empty_like(self.slots)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all buffers."""
        return tuple(vars(self).values())


class PagedCache:
    """Keys and values of N sequences, in blocks that a sequence uses as it grows.

    Attributes:
        keys, values: [layers, blocks, S, H, D], with S slots in a block.
        block_table: [N, B], int64, the blocks of each sequence in order; -1 if there is no block yet.
        lengths: [N], int64, tokens of each sequence in the cache.
        buffers: Memory of one step.

    Args:
        sizes: Sizes of the decoder.
        sequences: N.
        block_size: S.
        blocks: Number of blocks; if None, enough for all sequences at their maximum length. order: Order in
            which blocks are assigned; if None, from the first to the last.
        dtype: Dtype of keys, values and activations.
        device: Device of all memory.

    Raises:
        ValueError: If `order` is not a permutation of the blocks.

    Example:
        >>> cache = PagedCache(DecoderSizes(), 2, block_size=4)
        >>> cache.reserve([5, 3])
        >>> cache.block_table[:, :3]
        tensor([[ 0,  1, -1],
                [ 2, -1, -1]])
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        sequences: int,
        *,
        block_size: int = 16,
        blocks: int | None = None,
        order: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        most = -(-sizes.positions // block_size)
        blocks = sequences * most if blocks is None else blocks
        self._free = list(range(blocks) if order is None else order)
        if sorted(self._free) != list(range(blocks)):
            raise ValueError(f"order must have each of the {blocks} blocks once, got {order}")
        self.sizes, self.block_size = sizes, block_size
        shape = (sizes.layers, blocks, block_size, sizes.heads, sizes.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.block_table = torch.full((sequences, most), -1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.buffers = DecodeBuffers(sizes, sequences, dtype, device)
        self._used: list[list[int]] = [[] for _ in range(sequences)]

    @property
    def sequences(self) -> int:
        """Number of sequences, N."""
        return len(self._used)

    def reserve(self, tokens: Sequence[int]) -> None:
        """Give each sequence the blocks that its number of tokens needs; it keeps the blocks that it has.

        Raises:
            ValueError: If there is not one number for each sequence, a number exceeds the decoder's
                positions, or too few blocks are free. No block is assigned then.
        """
        if len(tokens) != self.sequences:
            raise ValueError(f"the cache has {self.sequences} sequences, but {len(tokens)} numbers are given")
        if max(tokens, default=0) > self.sizes.positions:
            raise ValueError(
                f"{max(tokens)} tokens are more than the decoder's {self.sizes.positions} positions"
            )
        wanted = [
            max(0, -(-count // self.block_size) - len(used))
            for count, used in zip(tokens, self._used, strict=True)
        ]
        if sum(wanted) > len(self._free):
            raise ValueError(f"the cache has {len(self._free)} free blocks, but needs {sum(wanted)}")
        for sequence, count in enumerate(wanted):
            used = self._used[sequence]
            for _ in range(count):
                self.block_table[sequence, len(used)] = self._free[0]
                used.append(self._free.pop(0))

    def release(self, sequence: int) -> None:
        """Free the blocks of a sequence, which is then empty."""
        self._free += self._used[sequence]
        self._used[sequence] = []
        self.block_table[sequence] = -1
        self.lengths[sequence] = 0

    def slots(self, positions: Tensor) -> Tensor:
        """Return the slots [N, L] of tokens at positions [N, L] of each sequence; they must be reserved."""
        blocks = self.block_table.gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size
