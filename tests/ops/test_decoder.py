"""The decoder: prefill, decode steps and whole sequences agree, and its cache is written in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.ops.decoder import Decoder, DecoderSizes, PagedCache, generate, pad, sample
from opsmith.ops.decoder.step import begin_decode_step

SIZES = DecoderSizes(vocabulary=50, width=24, layers=2, heads=2, hidden=20, positions=32)
PROMPTS = ([3, 14, 15, 9, 2, 6, 5], [35], [8, 9, 7, 9, 3])
BLOCK = 4


@pytest.fixture(scope="module")
def network() -> Decoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder(SIZES)


def shuffled_cache(sizes: DecoderSizes = SIZES, sequences: int = len(PROMPTS)) -> PagedCache:
    blocks = sequences * -(-sizes.positions // BLOCK) + 5
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    cache = PagedCache(sizes, sequences, block_size=BLOCK, blocks=blocks, order=order)
    for memory in (cache.keys, cache.values):
        memory.fill_(torch.nan)  # a slot that nobody wrote must not matter
    return cache


def decoded(network: Decoder, cache: PagedCache, steps: int) -> Iterator[tuple[list[list[int]], Tensor]]:
    """Sequences so far, and the logits of the next token of each: after the prefill and after each step."""
    sequences = [list(prompt) for prompt in PROMPTS]
    cache.reserve([len(each) + steps for each in sequences])
    logits = network.prefill(*pad(sequences), cache)
    yield sequences, logits
    for _ in range(steps):
        tokens = logits.argmax(-1)
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        logits = network.decode(tokens, cache)
        yield sequences, logits


def test_prefill_and_decode_give_the_logits_of_whole_sequences(network: Decoder) -> None:
    for sequences, logits in decoded(network, shuffled_cache(), 9):
        for sequence, row in zip(sequences, logits, strict=True):
            assert_close(row, network(torch.tensor([sequence]))[0, -1], atol=1e-5, rtol=1e-5)


def test_the_future_does_not_matter(network: Decoder) -> None:
    tokens = torch.randint(50, (1, 9))
    before = network(tokens)
    tokens[0, 5:] = 0
    assert_close(network(tokens)[:, :5], before[:, :5])


def test_a_step_writes_one_slot_of_each_sequence_in_place(network: Decoder) -> None:
    cache = shuffled_cache()
    list(decoded(network, cache, 2))
    cache.reserve([length + 1 for length in cache.lengths.tolist()])
    slots = cache.slots(cache.lengths[:, None]).flatten()
    memories = {name: getattr(cache, name) for name in ("keys", "values")}
    before = {name: (each.clone(), each._version, each.data_ptr()) for name, each in memories.items()}
    network.decode(torch.tensor([1, 2, 3]), cache)
    for name, memory in memories.items():
        values, version, pointer = before[name]
        assert memory.data_ptr() == pointer
        assert memory._version > version
        changed = (memory.nan_to_num(7e9) != values.nan_to_num(7e9)).flatten(3).any(-1).flatten(1)
        for layer in changed:
            assert sorted(layer.nonzero().flatten().tolist()) == sorted(slots.tolist())


def test_a_gradient_reaches_each_parameter(network: Decoder) -> None:
    network(torch.randint(50, (2, 9))).square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    network.zero_grad()


@pytest.mark.slow
def test_generation_follows_its_seed(network: Decoder) -> None:
    def texts(seed: int, temperature: float = 1.0) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        rows = generate(network, shuffled_cache(), PROMPTS, 10, temperature=temperature, generator=random)
        return torch.stack(list(rows), 1)

    assert texts(0).shape == (3, 10)
    assert torch.equal(texts(0), texts(0))
    assert not torch.equal(texts(0), texts(1))
    assert torch.equal(texts(0, 0.0), texts(1, 0.0))


def test_a_cache_is_used_again(network: Decoder) -> None:
    cache = shuffled_cache()
    first, again = (torch.stack(list(generate(network, cache, PROMPTS, 20, temperature=0))) for _ in range(2))
    assert torch.equal(first, again)


def test_sample() -> None:
    logits, random = torch.tensor([[0.0, 1.0, 2.0]]), torch.Generator().manual_seed(0)
    drawn = torch.cat([sample(logits, 0.5, random) for _ in range(2000)]).bincount(minlength=3) / 2000
    assert_close(drawn, (logits[0] / 0.5).softmax(0), atol=0.05, rtol=0)
    with pytest.raises(ValueError, match="the temperature must be 0 or above, got -1"):
        sample(logits, -1, random)


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([[1], []], 2, "a prompt is empty"),
        ([], 2, "a prompt is empty"),
        ([[1] * 20, [1]], 13, "a prompt of 20 tokens and 13 more exceed the decoder's 32 positions"),
        ([[1], [1], [1]], 2, "the cache has 2 sequences, but 3 numbers are given"),
    ],
)
def test_prompts_that_do_not_fit(network: Decoder, prompts: Any, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(generate(network, PagedCache(SIZES, 2), prompts, count))


def test_a_cache_gives_out_blocks_and_takes_them_back() -> None:
    cache = PagedCache(SIZES, 2, block_size=4, blocks=3, order=[2, 0, 1])
    cache.reserve([5, 1])
    assert cache.block_table[:, :2].tolist() == [[2, 0], [1, -1]]
    before = cache.block_table.clone()
    with pytest.raises(ValueError, match="the cache has 0 free blocks, but needs 1"):
        cache.reserve([5, 5])
    with pytest.raises(ValueError, match="33 tokens are more than the decoder's 32 positions"):
        cache.reserve([33, 1])
    assert torch.equal(cache.block_table, before)
    cache.release(0)
    cache.reserve([0, 5])
    assert cache.block_table[:, :2].tolist() == [[-1, -1], [1, 2]]
    with pytest.raises(ValueError, match=re.escape("order must have each of the 2 blocks once, got [0, 0]")):
        PagedCache(SIZES, 1, blocks=2, order=[0, 0])


def test_a_step_beyond_the_blocks_is_refused(network: Decoder) -> None:
    sizes = DecoderSizes(vocabulary=50, width=24, layers=2, heads=2, hidden=20, positions=4)
    cache = PagedCache(sizes, 1, block_size=4)
    cache.reserve([4])
    network.prefill(torch.tensor([[1, 2, 3, 4]]), torch.tensor([4]), cache)
    with pytest.raises((errors.KernelError, RuntimeError), match=r"hold no more|out of bounds"):
        network.decode(torch.tensor([1]), cache)
    assert cache.lengths.tolist() == [4]


def test_a_step_without_a_block_is_refused_and_can_be_repeated(network: Decoder) -> None:
    caches = [PagedCache(SIZES, 1, block_size=4) for _ in range(2)]
    for cache in caches:
        cache.reserve([4])
        network.prefill(torch.tensor([[1, 2, 3, 4]]), torch.tensor([4]), cache)
    token = torch.tensor([5])
    with pytest.raises(
        (errors.KernelError, IndexError), match=r"has no block for one more token|out of range"
    ):
        network.decode(token, caches[0])
    for cache in caches:
        cache.reserve([5])
    assert_close(network.decode(token, caches[0]), network.decode(token, caches[1]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "expects `layers` to be a whole number of at least 1, got 0"),
        ({"width": 2.5}, "expects `width` to be a whole number of at least 1, got 2.5"),
        ({"width": 96, "heads": 5}, "expects the width to be a multiple of 10, twice the heads, got 96"),
    ],
)
def test_sizes_that_cannot_be(sizes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderSizes(**sizes)


def test_begin_decode_step_in_each_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        x, residual = torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)
        positions, slots = torch.zeros(2, 2, dtype=torch.int64).unbind()
        lengths, table = torch.tensor([5, 0]), torch.tensor([[4, 2], [1, -1]])
        embedding = torch.randn(7, 3).to(dtype)
        begin_decode_step(x, residual, positions, slots, lengths, torch.tensor([6, 2]), embedding, table, 4)
        assert torch.equal(x, embedding[[6, 2]])
        assert not residual.any()
        assert [each.tolist() for each in (positions, slots, lengths)] == [[5, 0], [9, 4], [6, 1]]


@pytest.mark.parametrize(
    ("token", "length", "message"),
    [
        (7, 0, r"token 7 of sequence 0 is not in the embedding, which has 7|out of range"),
        (-1, 0, r"token -1 of sequence 0 is not in the embedding, which has 7|out of range"),
        (0, 5, r"sequence 0 has no block for one more token|out of range"),
        (0, 8, r"sequence 0 has 8 tokens, but its 2 blocks hold no more tokens|out of bounds"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)  # the kernel, and the reference
def test_begin_decode_step_refuses_before_it_writes(
    dtype: torch.dtype, token: int, length: int, message: str
) -> None:
    x, embedding = torch.ones(1, 3, dtype=dtype), torch.ones(7, 3, dtype=dtype)
    table = torch.tensor([[0, -1]])
    positions, slots = torch.zeros(2, 1, dtype=torch.int64).unbind()
    for at, row in ((3, 1), (length, token)):  # the kernel looks at a call whose signature is known
        lengths = torch.tensor([at])
        if at == 3:
            begin_decode_step(
                x, x.clone(), positions, slots, lengths, torch.tensor([row]), embedding, table, 4
            )
            continue
        with pytest.raises((errors.KernelError, IndexError, RuntimeError), match=message):
            begin_decode_step(
                x, x.clone(), positions, slots, lengths, torch.tensor([row]), embedding, table, 4
            )
        assert torch.equal(x, torch.ones_like(x))
        assert lengths.item() == length


@pytest.mark.slow
def test_check_of_begin_decode_step_passes() -> None:
    report = opsmith.check(begin_decode_step, effort="quick")
    assert report.passed, report
