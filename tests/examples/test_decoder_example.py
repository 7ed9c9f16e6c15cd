"""The example that trains a language model: its text, training and files, and its plain counterpart."""

from __future__ import annotations

import importlib
import io
import json
import math
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from opsmith.ops.decoder import Decoder, DecoderSizes, PagedCache, pad

pytestmark = pytest.mark.usefixtures("decoder_on_the_path")

SIZES = DecoderSizes(width=16, layers=1, heads=2, hidden=16, positions=24)
QUICK = ("--width", "16", "--layers", "1", "--heads", "2", "--hidden", "16", "--positions", "24")
PROMPTS = ([3, 14, 15, 9, 2], [35], [8, 9, 7])


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def keeps_threads() -> Iterator[None]:
    """The commands set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, decoder_on_the_path: None) -> Path:
    """The results of a short run."""
    out, before = tmp_path_factory.mktemp("runs") / "new" / "folder", torch.get_num_threads()
    with redirect_stdout(io.StringIO()) as printed:
        assert (
            module("train").main(
                [*QUICK, "--steps", "30", "--out", str(out), "--weights", str(out.parent / "half.pt")]
            )
            == 0
        )
    torch.set_num_threads(before)
    (out / "printed").write_text(printed.getvalue())
    return out


@pytest.fixture
def network() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SIZES)


def test_the_text_is_that_of_python_and_what_is_held_out_is_not_trained_on() -> None:
    text = module("data").python_documentation()
    training, held_out = (bytes(part.tolist()).decode() for part in (text.training, text.held_out))
    assert len(training) > 200_000
    assert 0.01 < len(held_out) / len(training) < 0.2
    paragraphs = [{each for each in part.split("\n\n") if each.strip()} for part in (training, held_out)]
    assert not paragraphs[0] & paragraphs[1]


def test_batches_are_pieces_of_the_text() -> None:
    data = module("data")
    text = torch.arange(100, dtype=torch.uint8)
    drawn = data.batch(text, 5, 9, torch.Generator().manual_seed(0))
    assert drawn.shape == (5, 10)
    assert (drawn.diff() == 1).all()
    again = data.batch(text, 5, 9, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)
    assert data.pieces(text, 9)[1].tolist() == list(range(9, 19))
    assert data.tensor_of("é").tolist() == [195, 169]


@pytest.mark.slow
def test_the_optimizer_is_adamw() -> None:
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (3,))] for _ in range(2))
    optimizer = module("optimizer").AdamW(ours, weight_decay=0.1, beta2=0.95)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        optimizer.step(0.1)
        reference.step()
    assert_close([*ours], [*theirs])
    optimizer.zero_grad()
    assert all(each.grad is None for each in ours)


@pytest.mark.slow
def test_training_lowers_the_loss(finished: Path) -> None:
    written = json.loads((finished / "history.json").read_text())
    assert written["steps"] == written["history"][-1]["step"] == 30
    assert written["history"][-1]["held_out"] < written["history"][0]["held_out"] - 1
    lines = (finished / "printed").read_text().splitlines()
    assert lines[0].startswith("step     3 of 30: training ")
    assert lines[-1].startswith(f"results: {finished}; to write text: ")


@pytest.mark.slow
def test_training_gives_the_same_numbers_again() -> None:
    training = module("training")
    plan = training.Plan(3, 2, 0.01, 5, SIZES)
    losses = [[run.step() for _ in range(3)] for run in (training.Training(plan), training.Training(plan))]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_run_that_diverges_says_so(
    tmp_path: Path, keeps_threads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert module("train").main([*QUICK, "--steps", "9", "--lr", "1e30", "--out", str(tmp_path / "out")]) == 1
    assert "the loss is nan; choose a smaller --lr" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def both(network: Decoder) -> list[tuple[Decoder, PagedCache]]:
    """The network and the same one of torch's own operations, each with a cache in shuffled blocks."""
    order = torch.randperm(18, generator=torch.Generator().manual_seed(1)).tolist()
    plain = module("plain").PlainDecoder.of(network)
    made = [(each, PagedCache(SIZES, 3, block_size=4, order=order)) for each in (network, plain)]
    for _, cache in made:
        cache.reserve([12, 8, 10])
    return made


def test_plain_pytorch_gives_the_same_logits(network: Decoder) -> None:
    contenders = both(network)
    tokens, lengths = pad(PROMPTS)
    assert_close(*(each(tokens) for each, _ in contenders))
    assert_close(*(each.prefill(tokens, lengths, cache) for each, cache in contenders))
    for token in (1, 200, 30):
        assert_close(*(each.decode(torch.full((3,), token), cache) for each, cache in contenders))
    ours, theirs = (cache for _, cache in contenders)
    assert_close(ours.keys, theirs.keys)
    assert_close(ours.values, theirs.values)
    assert torch.equal(ours.lengths, theirs.lengths)


def test_plain_pytorch_gives_the_same_gradients(network: Decoder) -> None:
    tokens, gradients = torch.randint(256, (2, 9)), []
    for each in (network, module("plain").PlainDecoder.of(network)):
        network.zero_grad()
        module("training").bits_per_byte(each, tokens).backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.compile
def test_a_compiled_step_allocates_its_logits_alone(network: Decoder) -> None:
    (_, eager), (_, compiled) = both(network)
    for cache in (eager, compiled):
        network.prefill(*pad(PROMPTS), cache)
        network.decode(
            torch.zeros(3, dtype=torch.int64), cache
        )  # an operator's first call replaces its `__call__`
    torch.compiler.reset()
    step = torch.compile(network.decode, fullgraph=True)
    pointers = [each.data_ptr() for each in (compiled.keys, compiled.values)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for token in (1, 200, 30):
            tokens = torch.full((3,), token)
            assert_close(step(tokens, compiled), network.decode(tokens, eager))
        tokens, logits = torch.full((3,), 7), []
        allocated = module("speed").allocations(lambda: logits.append(step(tokens, compiled)))
    assert allocated == [logits[0].nbytes] == [3 * 256 * 4]
    assert_close(logits[0], network.decode(tokens, eager))
    assert_close(compiled.keys, eager.keys)
    assert pointers == [each.data_ptr() for each in (compiled.keys, compiled.values)]


def test_an_eager_step_allocates_no_memory_of_a_caches_size(network: Decoder) -> None:
    ((_, cache), _) = both(network)
    network.prefill(*pad(PROMPTS), cache)
    tokens = torch.full((3,), 7)
    for _ in range(2):
        network.decode(tokens, cache)
    allocated = module("speed").allocations(lambda: network.decode(tokens, cache))
    assert allocated == [3 * 256 * 4]
    assert max(module("speed").allocations(cache.keys.clone)) >= cache.keys.nbytes  # it would be seen


def test_checkpoints_hold_the_network(finished: Path) -> None:
    checkpoint = module("checkpoint")
    network, about = checkpoint.read(finished / "last.pt")
    half, _ = checkpoint.read(finished.parent / "half.pt")
    assert network.sizes == half.sizes == DecoderSizes(**SIZES.to_dict())
    assert about["steps"] == 30
    assert about["command"].startswith("python examples/decoder/train.py --width 16 ")
    for name, weight in network.state_dict().items():
        assert torch.equal(half.state_dict()[name], weight.half().float())


def test_text_is_written_and_follows_the_seed(
    finished: Path, keeps_threads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*more: str) -> str:
        given = ["--out", str(finished), "--tokens", "12", "--prompt", "class", *more]
        assert module("generate").main(given) == 0
        return capsys.readouterr().out

    first = text()
    assert first.startswith("--- 'class'\nclass")
    assert text() == first
    assert text("--seed", "1") != first
    assert "--- 'def'\ndef" in text("--prompt", "def")


def test_rates_are_measured_of_each_contender(network: Decoder) -> None:
    speed, plain = module("speed"), module("plain").PlainDecoder.of(network)
    contenders = [speed.contender("plain", plain, 2), speed.contender("bundled", network, 2)]
    for rates in (speed.decode_rates(contenders, 4, 3, 2), speed.prefill_rates(contenders, 8, 2)):
        assert {name: len(seen) for name, seen in rates.items()} == {"plain": 2, "bundled": 2}
        assert all(math.isfinite(rate) and rate > 0 for seen in rates.values() for rate in seen)
        lines = speed.lines(rates, "plain")
        assert lines[0].endswith("x1.00")
        assert "tokens/s" in lines[1]


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def of_something_else(path: Path) -> None:
    torch.save({"weights": torch.ones(2)}, path)


def of_another_network(path: Path) -> None:
    loaded = torch.load(path, weights_only=True)
    torch.save(loaded | {"sizes": loaded["sizes"] | {"layers": 2}}, path)


def of_sizes_that_cannot_be(path: Path) -> None:
    loaded = torch.load(path, weights_only=True)
    torch.save(loaded | {"sizes": {"depth": 2}}, path)


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing, "there is no checkpoint {path}; train one: python examples/decoder/train.py\n"),
        (damaged, "{path} is damaged, or no checkpoint at all; train one"),
        (of_something_else, "{path} is no checkpoint of this example ('opsmith decoder 1'); train one"),
        (of_another_network, "{path} does not fit what this code makes: RuntimeError: "),
        (of_sizes_that_cannot_be, "{path} does not fit what this code makes: TypeError: "),
    ],
)
def test_a_checkpoint_that_cannot_be_used(
    finished: Path,
    tmp_path: Path,
    change: Any,
    message: str,
    keeps_threads: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes((finished / "last.pt").read_bytes())
    change(path)
    assert module("generate").main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("generate.py: " + message.format(path=path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", ""), "a prompt is empty: give at least one token of each sequence"),
        (
            ("--prompt", "x" * 20, "--tokens", "5"),
            "a prompt of 20 tokens and 5 more exceed the decoder's 24",
        ),
    ],
)
def test_a_prompt_that_cannot_be(
    finished: Path,
    options: tuple[str, ...],
    message: str,
    keeps_threads: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert module("generate").main(["--out", str(finished), *options]) == 2
    assert capsys.readouterr().err.startswith(f"generate.py: {message}")


BAD_OPTIONS = {
    ("train", "--steps 0"): "argument --steps: expected a whole number from 1 on, got '0'",
    ("train", "--steps two"): "argument --steps: expected a whole number from 1 on, got 'two'",
    ("train", "--seed -1"): "argument --seed: expected a whole number from 0 to 4294967295, got '-1'",
    ("train", "--lr 0"): "argument --lr: expected a number above 0, got '0'",
    ("train", "--lr nan"): "argument --lr: expected a number above 0, got 'nan'",
    ("train", "--heads 5"): "DecoderSizes expects the width to be a multiple of 10, twice the heads, got 96",
    ("train", f"--out {__file__}"): f"argument --out: expected a folder, got the file {__file__}",
    ("generate", "--temperature -1"): "argument --temperature: expected a number from 0 on, got '-1'",
    ("generate", "--tokens 0"): "argument --tokens: expected a whole number from 1 on, got '0'",
}


@pytest.mark.parametrize(("command", "arguments"), BAD_OPTIONS)
def test_bad_options_are_refused(command: str, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        module(command).main(arguments.split())
    assert left.value.code == 2
    assert f"{command}.py: error: {BAD_OPTIONS[command, arguments]}" in capsys.readouterr().err


def test_an_interrupt_ends_without_a_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keeps_threads: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(self: Any) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(module("training").Training, "step", interrupted)
    assert module("train").main([*QUICK, "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "train.py: interrupted\n"
    assert not list((tmp_path / "out").iterdir())
