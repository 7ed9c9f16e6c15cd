"""The same network without opsmith's operators: what they are compared with, in answers and in time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.ops.decoder import Decoder, PagedCache
from opsmith.ops.decoder.network import DecoderBlock

EPS = 1e-6


class PlainDecoder(Decoder):
    """A decoder of torch's own operations, with the parameters and the cache of the other."""

    @classmethod
    def of(cls, network: Decoder) -> PlainDecoder:
        """A decoder that shares the parameters of another."""
        made = cls(network.sizes)
        made.embedding, made.norm, made.blocks = network.embedding, network.norm, network.blocks
        return made

    def states(self, tokens: Tensor, cache: PagedCache | None = None, slots: Tensor | None = None) -> Tensor:
        """The last block's normalised result for whole sequences, [N, L, W]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        residual = F.embedding(tokens, self.embedding)
        for layer, block in enumerate(self.each_block()):
            query, key, value = self._heads(residual, block, positions)
            if cache is not None and slots is not None:
                kept = slots >= 0
                _store(cache, layer, key.flatten(0, 1)[kept], value.flatten(0, 1)[kept], slots[kept])
            attended = F.scaled_dot_product_attention(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
            )
            residual = _after_attention(residual, attended.transpose(1, 2).flatten(2), block)
        return F.rms_norm(residual, (self.sizes.width,), self.norm, EPS)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: PagedCache) -> Tensor:
        """Add a token to each sequence, and return the logits of the next, [N, V]."""
        positions = cache.lengths.clone()
        slots = cache.slots(positions[:, None])[:, 0]
        cache.lengths.add_(1)
        residual = F.embedding(tokens, self.embedding)
        table = cache.block_table.clamp(min=0)
        count, room = tokens.shape[0], table.shape[1] * cache.block_size
        there = torch.arange(room, device=tokens.device) < cache.lengths[:, None]
        for layer, block in enumerate(self.each_block()):
            query, key, value = self._heads(residual, block, positions)
            _store(cache, layer, key, value, slots)
            keys, values = (
                each[layer][table].flatten(1, 2).transpose(1, 2) for each in (cache.keys, cache.values)
            )
            attended = F.scaled_dot_product_attention(
                query[:, :, None], keys, values, attn_mask=there[:, None, None]
            )
            residual = _after_attention(residual, attended.reshape(count, -1), block)
        return F.linear(F.rms_norm(residual, (self.sizes.width,), self.norm, EPS), self.embedding)

    def _heads(
        self, residual: Tensor, block: DecoderBlock, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., H, D], the first two turned by their positions."""
        x = F.rms_norm(residual, (self.sizes.width,), block.norm1, EPS)
        query, key, value = (
            F.linear(x, block.qkv).unflatten(-1, (3, self.sizes.heads, self.sizes.head_dim)).unbind(-3)
        )
        cos, sin = self.cos_sin[positions][..., None, :].chunk(2, -1)
        return _turned(query, cos, sin), _turned(key, cos, sin), value


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _after_attention(residual: Tensor, attended: Tensor, block: DecoderBlock) -> Tensor:
    residual = residual + F.linear(attended, block.out)
    x = F.rms_norm(residual, residual.shape[-1:], block.norm2, EPS)
    gate, up = F.linear(x, block.gate_up).chunk(2, -1)
    return residual + F.linear(F.silu(gate) * up, block.down)


def _store(cache: PagedCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    at = slots // cache.block_size, slots % cache.block_size
    cache.keys[layer].index_put_(at, key)
    cache.values[layer].index_put_(at, value)
