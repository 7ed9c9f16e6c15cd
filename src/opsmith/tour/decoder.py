"""Stage: a small language model writes text, and keeps keys and values in a paged cache, in place.

`decoder.pt` in this folder has its weights in float16. `examples/decoder` trained it on the documentation of
Python; the entry `about` of the file has the command and the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.core.output_file import replacing
from opsmith.ops.decoder import Decoder, DecoderSizes, PagedCache, generate, pad
from opsmith.tour.stage import StageResult, TourContext, progress, write_json

WEIGHTS = Path(__file__).with_name("decoder.pt")
PROMPTS = ("The `", "A class is ", "import ", "If the ")
TEMPERATURE = 0.6
BLOCK_SIZE = 16

CLOSE = 1e-5
"""Allowed difference of logits between prefill and decode, as a fraction of the largest logit."""

ENOUGH = 16
"""Number of bytes that must be generated."""

BARS = 50
"""Number of steps of the progress bar."""


@dataclass(frozen=True)
class Written:
    """Texts that were generated.

    Args:
        texts: Prompts with their continuations.
        count: Bytes generated.
        seconds: Time that it took.
    """

    texts: tuple[str, ...]
    count: int
    seconds: float


def load_decoder(path: Path = WEIGHTS) -> tuple[Decoder, dict[str, Any]]:
    """Load a network in float32, and the description in its checkpoint."""
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    network = Decoder(DecoderSizes(**loaded["sizes"]))
    network.load_state_dict(loaded["weights"])
    return network, loaded["about"]


def difference_of_decode(network: Decoder, texts: tuple[str, ...], seed: int) -> float:
    """Compare the logits of a prefill with the logits of decode steps for the last bytes, in shuffled blocks.

    Returns: The largest difference, as a fraction of the largest logit.
    """
    random = torch.Generator().manual_seed(seed)
    prompts = [list(text.encode()) for text in texts]
    steps = min(map(len, prompts)) - 1
    blocks = len(prompts) * -(-network.sizes.positions // BLOCK_SIZE)
    order = torch.randperm(blocks, generator=random).tolist()
    expected, got = (
        PagedCache(network.sizes, len(prompts), block_size=BLOCK_SIZE, order=order) for _ in range(2)
    )
    for cache in (expected, got):
        cache.reserve([len(prompt) for prompt in prompts])
    right = network.prefill(*pad(prompts), expected)
    logits = network.prefill(*pad([prompt[:-steps] for prompt in prompts]), got)
    for left in range(steps, 0, -1):
        logits = network.decode(torch.tensor([prompt[-left] for prompt in prompts]), got)
    return ((logits - right).abs().max() / right.abs().max()).item()


def write(network: Decoder, context: TourContext) -> Written:
    """Continue the prompts again and again until the time is up, at least once."""
    random = torch.Generator().manual_seed(context.seed)
    cache = PagedCache(network.sizes, len(PROMPTS))
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    length = network.sizes.positions - max(map(len, prompts))
    texts: list[str] = []
    count, shown = 0, 0
    start = perf_counter()
    with progress(context.console, "writing", BARS) as advance:
        while not texts or perf_counter() - start < context.decoder_seconds:
            rows: list[Tensor] = []
            for tokens in generate(
                network, cache, prompts, length, temperature=TEMPERATURE, generator=random
            ):
                rows.append(tokens)
                count += len(tokens)
                passed = perf_counter() - start
                while shown < min(BARS, BARS * passed / max(context.decoder_seconds, 1e-9)):
                    shown += 1
                    advance(f"{count / passed:.0f} tokens/s")
                if passed >= context.decoder_seconds and len(rows) >= ENOUGH:
                    break
            written = torch.stack(rows, 1).tolist()
            texts += [
                prompt + bytes(row).decode(errors="replace")
                for prompt, row in zip(PROMPTS, written, strict=True)
            ]
    return Written(tuple(texts), count, perf_counter() - start)


@thread_count(1)
def run(context: TourContext) -> StageResult:
    """Compare prefill and decode, write text and figures to files, and print some of the text."""
    network, about = load_decoder()
    difference = difference_of_decode(network, PROMPTS, context.seed)
    if not math.isfinite(difference):
        return StageResult(False, "the logits are not finite numbers", {"about": about})
    written = write(network, context)
    rate = written.count / written.seconds
    context.console.print("two texts of the small model, which learnt bytes from Python's documentation:")
    for text in written.texts[:2]:
        context.console.print(text, markup=False, highlight=False, soft_wrap=True)
    details = {
        "about": about,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "sequences": len(PROMPTS),
        "tokens": written.count,
        "seconds": round(written.seconds, 2),
        "tokens_per_second": round(rate, 1),
        "difference_of_decode_and_prefill": difference,
        "allowed_difference": CLOSE,
    }
    path = context.out / "decoder.txt"
    with replacing(path) as temporary:
        temporary.write_text("\n----\n".join(written.texts) + "\n", encoding="utf-8")
    files = path, write_json(context.out / "decoder.json", details)
    headline = (
        f"{rate:.0f} bytes of text a second, {len(PROMPTS)} sequences together; decode steps and a prefill "
        f"differ by {difference:.1e} (allowed: {CLOSE:.0e})"
    )
    passed = difference < CLOSE and written.count >= ENOUGH
    return StageResult(passed, headline, details, files)
