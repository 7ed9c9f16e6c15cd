"""The example that trains a RedNet: its files, its checkpoints, its picture and its bars."""

from __future__ import annotations

import copy
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from rednet_digits_run import FILES, QUICK, command, contents, loaded, module, same
from rich.console import Console

pytestmark = pytest.mark.usefixtures("on_the_path")


@pytest.fixture(scope="module")
def printed_by_finished() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, printed_by_finished: io.StringIO) -> Path:
    """The results of three epochs without an interruption."""
    out = tmp_path_factory.mktemp("runs") / "new" / "folder"
    with redirect_stdout(printed_by_finished):
        assert command(out) == 0
    return out


@contextmanager
def interrupted(steps: int) -> Iterator[None]:
    """A region in which Ctrl-C comes after so many steps, in the middle of an epoch for one."""
    training, left = module("training").Training, [steps]
    step = training.step

    def stepping(self: Any, batch: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return step(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "step", stepping)
        yield


def test_a_run_writes_what_it_says(finished: Path, printed_by_finished: io.StringIO) -> None:
    assert contents(finished) == FILES
    written = json.loads((finished / "history.json").read_text())
    assert written["configuration"] == {
        "epochs": 3,
        "batch": 32,
        "seed": 0,
        "lr": 0.01,
        "images": 64,
        "device": "cpu",
        "processes": 1,
    }
    history = written["history"]
    assert [record["epoch"] for record in history] == [1, 2, 3]
    assert loaded(finished / "last.pt")["state"]["history"] == history
    best = loaded(finished / "best.pt")["state"]["history"]
    assert best[-1]["accuracy"] == max(record["accuracy"] for record in history)
    *epochs, outcome, results = printed_by_finished.getvalue().splitlines()
    for line, record in zip(epochs, history, strict=True):
        assert line.startswith(f"epoch {record['epoch']:>3} of 3: ")
        assert f"training loss {record['training_loss']:.4f}" in line
        assert line.endswith(f"accuracy {record['accuracy']:.2%}")
    assert outcome == f"{history[-1]['accuracy']:.2%} of 360 held-out images read right (target: 98%)"
    assert results == f"results: {finished}"


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_for_bit(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with interrupted(3):  # in the second epoch
        assert command(tmp_path) == 130
    assert "--resume goes on after the last whole epoch" in capsys.readouterr().err
    assert contents(tmp_path) == ["best.pt", "history.json", "last.pt"]
    assert len(loaded(tmp_path / "last.pt")["state"]["history"]) == 1
    torch.rand(7)  # the process that goes on has used its random numbers otherwise
    assert command(tmp_path, "--resume") == 0
    assert f"going on from {tmp_path / 'last.pt'}, epoch 1 of 3" in capsys.readouterr().out
    for name in ("last.pt", "best.pt"):
        assert same(loaded(tmp_path / name), loaded(finished / name))
    for name in ("history.json", "curve.svg", "curve.png"):
        assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.slow
def test_no_part_of_a_checkpoint_could_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    options, training = module("options"), module("training")
    monkeypatch.setattr(training.Training, "test", lambda self: (0.0, 0.0))
    configuration = options.parse([*QUICK, "--epochs", "3"], module("processes").Processes()).configuration

    def begun() -> Any:
        return training.Training(configuration, torch.device("cpu"))

    first, fresh = begun(), begun().state_dict()
    first.epoch()
    state = copy.deepcopy(first.state_dict())
    expected = first.epoch()
    for part in (None, "network", "optimizer", "schedule", "generator"):
        again = begun()
        again.load_state_dict(copy.deepcopy(state | ({part: fresh[part]} if part else {})))
        assert (again.epoch() == expected) is (part is None), part


def test_what_is_finished_stays_so(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "last.pt").read_bytes()
    assert command(finished, "--resume") == 0
    assert "epoch 3 of 3" in capsys.readouterr().out
    assert (finished / "last.pt").read_bytes() == before


def test_an_unfinished_run_is_not_overwritten(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = tmp_path / "last.pt"
    checkpoint = loaded(finished / "last.pt")
    unfinished = module("options").Configuration(**checkpoint["configuration"] | {"epochs": 5})
    module("checkpoint").write(last, unfinished, checkpoint["state"])
    before = last.read_bytes()
    assert command(tmp_path) == 2
    assert capsys.readouterr().err == (
        f"train.py: {last} is of a run that has come to epoch 3 of 5; go on from it with --resume, "
        "move it away, or name another folder with --out\n"
    )
    assert last.read_bytes() == before


@pytest.mark.slow
def test_a_finished_run_is_overwritten(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    assert command(tmp_path, epochs=1) == 0
    assert len(loaded(tmp_path / "last.pt")["state"]["history"]) == 1


def test_another_configuration_is_refused_by_name(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in finished.iterdir()}
    assert command(finished, "--resume", "--seed", "4", "--lr", "0.02") == 2
    assert capsys.readouterr().err == (
        f"train.py: {finished / 'last.pt'} is of another configuration: "
        "lr 0.01 there, 0.02 here; seed 0 there, 4 here; "
        "give the same options to go on from it, or name another folder with --out\n"
    )
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    """One bit in the middle, within the numbers of a tensor: torch would load it."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def misnamed(content: bytes) -> bytes:
    """A name in the archive's table that is no text."""
    at = content.rindex(b"data.pkl")
    return content[:at] + b"\xff" + content[at + 1 :]


def packed(content: bytes) -> bytes:
    """A table that calls the numbers of a tensor compressed, which they are not."""
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/0"))
    return content[: entry + 10] + b"\x08" + content[entry + 11 :]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "is damaged: "),
        (flipped, "is damaged: the checksum of "),
        (misnamed, "is damaged: "),
        (packed, "is damaged: "),
        (lambda content: b"", "is damaged: "),
        (lambda content: b"no zip" * 100, "is damaged: "),
    ],
    ids=["truncated", "flipped", "misnamed", "packed", "empty", "garbage"],
)
def test_a_damaged_checkpoint_is_refused(
    finished: Path,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = tmp_path / "last.pt"
    damaged = damage((finished / "last.pt").read_bytes())
    last.write_bytes(damaged)
    assert command(tmp_path, "--resume") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"train.py: {last} {said}")
    assert told.endswith("move it away and start without --resume, or name another folder with --out\n")
    assert command(tmp_path) == 2  # nor is it overwritten
    assert last.read_bytes() == damaged


def test_a_flipped_bit_is_not_seen_by_torch(finished: Path) -> None:
    content = flipped((finished / "last.pt").read_bytes())
    assert torch.load(io.BytesIO(content), weights_only=True)["format"] == module("checkpoint").FORMAT


@pytest.mark.parametrize("content", [{"weights": torch.ones(2)}, [1, 2]], ids=["others", "list"])
def test_another_file_is_no_checkpoint(
    tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "last.pt")
    assert command(tmp_path, "--resume") == 2
    assert "is no checkpoint of this example" in capsys.readouterr().err


def test_a_missing_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path / "nowhere", "--resume") == 2
    last = tmp_path / "nowhere" / "last.pt"
    assert capsys.readouterr().err == f"train.py: there is no checkpoint {last}; start without --resume\n"
    assert contents(tmp_path) == []


def test_an_interrupted_write_keeps_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_text("older")

    def interrupted() -> None:
        with module("files").replacing(path) as temporary:
            temporary.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "older"
    assert contents(tmp_path) == ["last.pt"]


@pytest.mark.slow
def test_a_run_that_diverges_ends_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path, "--lr", "1e30") == 1
    told = capsys.readouterr().err
    assert told.startswith("train.py: epoch 1: the loss is ")
    assert told.endswith("on held-out images; choose a smaller --lr\n")
    assert contents(tmp_path) == []


def test_the_picture_shows_the_history(finished: Path) -> None:
    history = json.loads((finished / "history.json").read_text())["history"]
    losses, accuracies = module("curve").figure(history, target=0.98).axes
    shown = {line.get_label(): line for line in losses.lines}
    for label, name in (("training", "training_loss"), ("held out", "held_out_loss")):
        assert [*shown[label].get_xdata()] == [1, 2, 3]
        assert [*shown[label].get_ydata()] == [record[name] for record in history]
    read, target = accuracies.lines
    assert [*read.get_ydata()] == [100 * record["accuracy"] for record in history]
    assert set(target.get_ydata()) == {98}
    assert shown["training"].get_color() != shown["held out"].get_color()
    assert shown["training"].get_marker() != shown["held out"].get_marker()
    assert (losses.get_xlabel(), accuracies.get_xlabel()) == ("epoch", "epoch")
    assert losses.get_ylabel() == "cross-entropy, smoothed labels (nats)"
    assert accuracies.get_ylabel() == "images read right (%)"


def test_the_picture_is_written_in_both_formats(finished: Path) -> None:
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    svg = (finished / "curve.svg").read_text()
    assert svg.rstrip().endswith("</svg>")
    assert "<dc:date>" not in svg


def test_bars_are_for_terminals() -> None:
    progress, processes = module("progress"), module("processes")
    for terminal in (True, False):
        voice = progress.Voice(processes.Processes())
        voice.console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with voice.bars(epochs=3, done=1, steps=2) as advance:
            for _ in range(3):
                advance()
            voice.say("epoch 2 is done")
        printed = voice.console.file.getvalue()
        assert "epoch 2 is done" in printed
        assert ("epoch 3" in printed) is terminal
        assert ("5/6" in printed) is terminal
        assert ("\x1b" in printed) is terminal


def without_head(parts: dict[str, Any]) -> None:
    parts["state"]["network"].pop("head.bias")


def with_another_stem(parts: dict[str, Any]) -> None:
    parts["state"]["network"]["stem.0.weight"] = torch.zeros(3)


def without_optimizer(parts: dict[str, Any]) -> None:
    del parts["state"]["optimizer"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_head, 'Missing key(s) in state_dict: "head.bias".'),
        (with_another_stem, "size mismatch for stem.0.weight"),
        (without_optimizer, "KeyError: 'optimizer'"),
    ],
)
def test_a_checkpoint_of_another_network_is_refused(
    finished: Path, tmp_path: Path, change: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, last = loaded(finished / "last.pt"), tmp_path / "last.pt"
    change(parts)
    torch.save(parts, last)
    before = last.read_bytes()
    assert command(tmp_path, "--resume") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"train.py: {last} does not fit what this code trains: ")
    assert said in told
    assert told.endswith("move it away and start without --resume, or name another folder with --out\n")
    assert told.count("\n") == 1
    assert last.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        {"a": 1},
        {"format": "rednet_digits 1"},
        torch.nn.Linear(1, 1),
        {"format": "rednet_digits 1", "state": 4},
    ],
    ids=["dictionary", "format alone", "module", "state of a number"],
)
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "last.pt")
    for more in ((), ("--resume",)):
        assert command(tmp_path, *more) == 2
        assert capsys.readouterr().err == (
            f"train.py: {tmp_path / 'last.pt'} is no checkpoint of this example ('rednet_digits 1'); "
            "move it away and start without --resume, or name another folder with --out\n"
        )


def test_a_folder_in_place_of_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "last.pt").mkdir()
    assert command(tmp_path, "--resume") == 2
    assert f"{tmp_path / 'last.pt'} cannot be read: Is a directory; move it away" in capsys.readouterr().err
