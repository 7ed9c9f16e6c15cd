"""The network of a decoder: training on whole sequences, and generation with a paged cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opsmith.ops.decoder.cache import PagedCache
from opsmith.ops.decoder.sizes import DecoderSizes
from opsmith.ops.decoder.step import begin_decode_step
from opsmith.ops.kv_cache import write_kv_cache
from opsmith.ops.paged_attention import paged_attention
from opsmith.ops.rms_norm import add_rms_norm_, rms_norm
from opsmith.ops.rope import rope_, rope_table
from opsmith.ops.swiglu import swiglu_
from opsmith.ops.write_linear import write_linear


class DecoderBlock(nn.Module):
    """Parameters of one block: attention, then two linear maps with a gate between them.

    Args:
        sizes: Sizes of the decoder.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.norm1 = nn.Parameter(torch.ones(width))
        self.qkv = _random(3 * width, width)
        self.out = _random(width, width, 2 * sizes.layers)
        self.norm2 = nn.Parameter(torch.ones(width))
        self.gate_up = _random(2 * hidden, width)
        self.down = _random(width, hidden, 2 * sizes.layers)


class Decoder(nn.Module):
    """Language model: rms_norm, rotary positions, causal attention and SwiGLU in each block.

    The logits are products with the embedding of each token. `forward` is for training. `prefill` and
    `decode` are for generation: they write keys and values into a paged cache, and record no gradients.

    Args:
        sizes: Sizes of the network.

    Example:
        >>> network = Decoder(DecoderSizes(width=32, layers=1, heads=2))
        >>> network(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(DecoderBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.Parameter(torch.ones(sizes.width))
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", rope_table(sizes.positions, sizes.head_dim), persistent=False)

    def each_block(self) -> tuple[DecoderBlock, ...]:
        """Return the blocks in their order."""
        return tuple(cast(Iterable[DecoderBlock], self.blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [N, L] to the logits of each next token [N, L, V]."""
        return F.linear(self.states(tokens), self.embedding)

    def states(self, tokens: Tensor, cache: PagedCache | None = None, slots: Tensor | None = None) -> Tensor:
        """Compute the last block's normalised result for whole sequences from their beginning.

        Args:
            tokens: [N, L], int64.
            cache: Cache for the keys and values.
            slots: [N L], slots of the tokens in the cache; negative for tokens that are left out.

        Returns:
            [N, L, W].
        """
        heads = self.sizes.heads
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        residual = F.embedding(tokens, self.embedding)
        for layer, block in enumerate(self.each_block()):
            # add_rms_norm_ would overwrite the residual, which the backward of the previous norm needs.
            x = rms_norm(residual, block.norm1)
            qkv = F.linear(x, block.qkv).unflatten(-1, (3 * heads, self.sizes.head_dim))
            rope_(qkv[..., : 2 * heads, :], self.cos_sin, positions)
            query, key, value = qkv[..., :heads, :], qkv[..., heads : 2 * heads, :], qkv[..., 2 * heads :, :]
            if cache is not None and slots is not None:
                write_kv_cache(
                    cache.keys[layer], cache.values[layer], key.flatten(0, 1), value.flatten(0, 1), slots
                )
            attended = F.scaled_dot_product_attention(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
            )
            residual = residual + F.linear(attended.transpose(1, 2).flatten(2), block.out)
            gate, up = F.linear(rms_norm(residual, block.norm2), block.gate_up).chunk(2, -1)
            residual = residual + F.linear(F.silu(gate) * up, block.down)
        states: Tensor = rms_norm(residual, self.norm)
        return states

    @torch.no_grad()
    def prefill(self, tokens: Tensor, lengths: Tensor, cache: PagedCache) -> Tensor:
        """Begin each sequence: write its keys and values into the cache, whose blocks must be reserved.

        Args:
            tokens: [N, L], int64, from the beginning of each sequence; tokens beyond its length are ignored.
            lengths: [N], int64, from 1 to L.
            cache: Cache of N sequences; written.

        Returns:
            Logits of the token after each sequence, [N, V].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        slots = torch.where(positions < lengths[:, None], cache.slots(positions), -1)
        states = self.states(tokens, cache, slots.flatten())
        cache.lengths.copy_(lengths)
        last = states[torch.arange(tokens.shape[0], device=tokens.device), lengths - 1]
        return F.linear(last, self.embedding)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: PagedCache) -> Tensor:
        """Add a token to each sequence, in place; when compiled, it allocates only the logits.

        Args:
            tokens: [N], int64.
            cache: Cache of N sequences, with a slot reserved for each; written.

        Returns:
            Logits of the next tokens, [N, V].
        """
        sizes, buffers = self.sizes, cache.buffers
        heads, hidden = sizes.heads, sizes.hidden
        x, residual, qkv, slots = buffers.x, buffers.residual, buffers.qkv, buffers.slots
        query, key, value = qkv[:, :heads], qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
        gate, up = buffers.hidden[:, :hidden], buffers.hidden[:, hidden:]
        begin_decode_step(
            x,
            residual,
            buffers.positions,
            slots,
            cache.lengths,
            tokens,
            self.embedding,
            cache.block_table,
            cache.block_size,
        )
        for layer, block in enumerate(self.each_block()):
            add_rms_norm_(x, residual, block.norm1)
            write_linear(qkv.flatten(1), x, block.qkv)
            rope_(qkv[:, : 2 * heads], self.cos_sin, buffers.positions)
            write_kv_cache(cache.keys[layer], cache.values[layer], key, value, slots)
            paged_attention.out(
                query,
                cache.keys[layer],
                cache.values[layer],
                cache.block_table,
                cache.lengths,
                out=buffers.attention,
            )
            write_linear(x, buffers.attention.flatten(1), block.out)
            add_rms_norm_(x, residual, block.norm2)
            write_linear(buffers.hidden, x, block.gate_up)
            swiglu_(gate, up)
            write_linear(x, gate, block.down)
        add_rms_norm_(x, residual, self.norm)
        return F.linear(x, self.embedding)


def _random(outputs: int, inputs: int, share: int = 1) -> nn.Parameter:
    """Make a weight that keeps the mean square of its input, divided by `share`."""
    return nn.Parameter(torch.randn(outputs, inputs) / (inputs * share) ** 0.5)
