"""The tour's stage that writes text with a small language model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from opsmith import ops
from opsmith.ops.decoder import Decoder, PagedCache
from opsmith.tour import TourContext, decoder
from opsmith.tour.operators import build_decoder_kernels


def context(out: Path, seed: int = 0) -> TourContext:
    return TourContext(
        out, torch.device("cpu"), Console(file=io.StringIO(), width=120), seed=seed, decoder_seconds=0
    )


def test_it_writes_text_and_says_how_the_weights_were_made(tmp_path: Path) -> None:
    given = context(tmp_path)
    result = decoder.run(given)
    assert result.passed
    assert result.details["difference_of_decode_and_prefill"] < decoder.CLOSE
    assert result.details["tokens"] == decoder.ENOUGH * len(decoder.PROMPTS)
    assert sorted(path.name for path in result.files) == ["decoder.json", "decoder.txt"]
    about = json.loads((tmp_path / "decoder.json").read_text())["about"]
    assert about["command"].startswith("python examples/decoder/train.py --steps ")
    texts = (tmp_path / "decoder.txt").read_text(encoding="utf-8").split("\n----\n")
    assert [text.startswith(prompt) for text, prompt in zip(texts, decoder.PROMPTS, strict=True)] == [
        True
    ] * 4
    assert isinstance(given.console.file, io.StringIO)
    printed = given.console.file.getvalue()
    assert printed.startswith(
        "two texts of the small model, which learnt bytes from Python's documentation:\n"
    )
    assert texts[0] in printed


@pytest.mark.slow
def test_texts_follow_the_seed(tmp_path: Path) -> None:
    network, _ = decoder.load_decoder()
    first, again, other = (decoder.write(network, context(tmp_path, seed)).texts for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_weights_are_small_and_have_learnt() -> None:
    assert decoder.WEIGHTS.stat().st_size < 700_000
    loaded = torch.load(decoder.WEIGHTS, weights_only=True)
    assert {each.dtype for each in loaded["weights"].values()} == {torch.float16}
    network, about = decoder.load_decoder()
    assert about["held_out_bits_per_byte"] < 2
    tokens = torch.tensor([list(b"The following table summarizes the operators in this section, and")])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(network(tokens)[0, :-1], tokens[0, 1:])
    assert loss.item() < 2  # of nats a byte; 5.5 without any knowledge


def test_a_decode_step_that_is_wrong_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Decoder.decode

    def shifted(self: Decoder, tokens: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        return step(self, tokens, cache) * 1.001

    monkeypatch.setattr(Decoder, "decode", shifted)
    assert not decoder.run(context(tmp_path)).passed


def test_logits_that_are_not_finite_do_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, about = decoder.load_decoder()
    torch.nn.init.constant_(network.norm, float("nan"))
    monkeypatch.setattr(decoder, "load_decoder", lambda: (network, about))
    result = decoder.run(context(tmp_path))
    assert not result.passed
    assert result.headline == "the logits are not finite numbers"


def test_the_set_up_builds_the_kernels_of_the_decoder() -> None:
    build_decoder_kernels()
    in_place = (ops.add_rms_norm_, ops.write_kv_cache, ops.rope_, ops.write_linear, ops.swiglu_)
    for operator in (ops.rms_norm, *in_place, ops.paged_attention.out_operator):
        (kernel,) = (each for each in operator.specification.kernels if each.device == "cpu")
        assert kernel.function.cached_plans, operator
