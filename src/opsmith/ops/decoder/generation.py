"""Generation of text: sampling of tokens, and the loop of decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from opsmith.ops.decoder.cache import PagedCache
from opsmith.ops.decoder.network import Decoder


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Draw a token of each row of logits [N, V] at a temperature; at 0, take the most likely one.

    Raises:
        ValueError: If the temperature is negative.

    Example:
        >>> sample(torch.tensor([[0.0, 9.0, 1.0]]), 0.0, torch.Generator())
        tensor([1])
    """
    if temperature < 0:
        raise ValueError(f"the temperature must be 0 or above, got {temperature}")
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(1)


def pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts as tokens [N, L], padded by zeros, and their lengths [N].

    Example:
        >>> pad([[5, 6], [7]])
        (tensor([[5, 6],
                [7, 0]]), tensor([2, 1]))
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    return torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), lengths


def generate(
    network: Decoder,
    cache: PagedCache,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
    decode: Callable[[Tensor, PagedCache], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Continue prompts: yield the next token of each, [N], `count` times.

    Args:
        network: Decoder.
        cache: Cache of as many sequences as there are prompts; its sequences are restarted.
        prompts: Tokens of each sequence, at least one.
        count: Number of tokens to generate for each.
        temperature: See `sample`.
        generator: Source of random numbers; a new one of seed 0 if None.
        decode: Function to call instead of `network.decode`, such as its compiled form.

    Raises:
        ValueError: If a prompt is empty, a prompt with its continuation exceeds the decoder's positions, or
            the cache has too few blocks or sequences.

    Example:
        >>> from opsmith.ops.decoder import DecoderSizes
        >>> sizes = DecoderSizes(width=32, layers=1, heads=2)
        >>> tokens = generate(Decoder(sizes), PagedCache(sizes, 2), [[1, 2], [3]], 4)
        >>> torch.stack(list(tokens)).shape
        torch.Size([4, 2])
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    if not prompts or not all(prompts):
        raise ValueError("a prompt is empty: give at least one token of each sequence")
    if longest + count > network.sizes.positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {count} more exceed the decoder's {network.sizes.positions} "
            f"positions: give a shorter prompt, or generate fewer tokens"
        )
    for sequence in range(cache.sequences):
        cache.release(sequence)
    cache.reserve([len(prompt) + count for prompt in prompts])
    random = torch.Generator().manual_seed(0) if generator is None else generator
    step = network.decode if decode is None else decode
    device = network.embedding.device
    tokens, lengths = pad(prompts)
    logits = network.prefill(tokens.to(device), lengths.to(device), cache)
    for left in reversed(range(count)):
        tokens = sample(logits.cpu(), temperature, random)
        yield tokens
        if left:
            logits = step(tokens.to(device), cache)
