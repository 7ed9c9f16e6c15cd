"""The example that trains a RedNet: its files, its checkpoints, its picture, and its two processes."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "examples" / "rednet_digits"
QUICK = ("--images", "64", "--batch", "32")  # two steps an epoch
FILES = ["best.pt", "curve.png", "curve.svg", "history.json", "last.pt"]


@pytest.fixture(scope="module", autouse=True)
def on_the_path() -> Iterator[None]:
    """The example's modules are imported as they are when Python runs its file `train.py`."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def module(name: str) -> Any:
    return importlib.import_module(name)


def command(out: Path, *options: str, epochs: int = 3) -> int:
    arguments = ["--epochs", str(epochs), *QUICK, "--out", str(out), *options]
    status: int = module("train").main(arguments)
    return status


def contents(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Whether two states are the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


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


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "is damaged: "),
        (flipped, "is damaged: the checksum of "),
        (lambda content: b"", "is damaged: "),
        (lambda content: b"no zip" * 100, "is damaged: "),
    ],
    ids=["truncated", "flipped", "empty", "garbage"],
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


BAD_OPTIONS = {
    "--epochs 0": "argument --epochs: expected a whole number from 1 on, got '0'",
    "--epochs two": "argument --epochs: expected a whole number from 1 on, got 'two'",
    "--seed -1": "argument --seed: expected a whole number from 0 to 4294967295, got '-1'",
    "--images 1438": "argument --images: expected a whole number from 2 to 1437, got '1438'",
    "--lr 0": "argument --lr: expected a number above 0, got '0'",
    "--lr nan": "argument --lr: expected a number above 0, got 'nan'",
    "--lr fast": "argument --lr: expected a number above 0, got 'fast'",
    "--batch 65 --images 64": "argument --batch: expected no more than the 64 training images, got 65",
    "--batch 1": "argument --batch: expected a multiple of the number of processes, 1, and two "
    "images or more for each, which batch normalisation needs, got 1",
    "--device tpu": "argument --device: invalid choice: 'tpu'",
    f"--out {__file__}": f"argument --out: expected a folder, got the file {__file__}",
}


@pytest.mark.parametrize("arguments", BAD_OPTIONS)
def test_bad_options_are_told(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        module("train").main(arguments.split())
    assert left.value.code == 2
    assert f"train.py: error: {BAD_OPTIONS[arguments]}" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        module("train").main(["--device", "cuda"])
    assert "argument --device: this torch sees no GPU; use --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_alone_tells_what_is_wrong(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    two = module("processes").Processes(rank, 2)
    with pytest.raises(SystemExit) as left:
        module("options").parse(["--batch", "63"], two)
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert ("expected a multiple of the number of processes, 2, " in told) is (rank == 0)
    assert bool(told) is (rank == 0)


def test_a_missing_package_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    assert command(tmp_path) == 2
    assert capsys.readouterr().err == (
        "train.py: matplotlib must be installed: pip install '.[plot]' in a checkout of opsmith\n"
    )
    assert contents(tmp_path) == []


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


def test_the_held_out_images_are_a_fifth_of_each_digit_and_not_trained_on() -> None:
    training, held_out = module("data").digits(0)
    assert (len(training), len(held_out)) == (module("options").TRAINING_IMAGES, 360)
    counts = training.labels.bincount() / len(training), held_out.labels.bincount() / len(held_out)
    assert (counts[0] - counts[1]).abs().max() < 0.01
    known = {tuple(image.flatten().tolist()) for image in training.pixels}
    assert not any(tuple(image.flatten().tolist()) in known for image in held_out.pixels)
    assert held_out.pixels.shape == (360, 1, 8, 8)
    assert (training.pixels.min(), training.pixels.max()) == (0, 1)
    assert not torch.equal(module("data").digits(1)[1].labels, held_out.labels)


def test_shifted_images_are_moved_by_one_pixel_at_most() -> None:
    data = module("data")
    pixels = torch.zeros(600, 1, 8, 8)
    pixels[:, 0, 3, 4] = torch.arange(600) + 1  # each image keeps its own
    moved = data.shifted(pixels, torch.Generator().manual_seed(0))
    images, _, rows, columns = moved.nonzero(as_tuple=True)
    assert torch.equal(images, torch.arange(600))
    assert torch.equal(moved[images, 0, rows, columns], images + 1.0)
    assert (set(rows.tolist()), set(columns.tolist())) == ({2, 3, 4}, {3, 4, 5})
    still = ((rows == 3) & (columns == 4)).float().mean().item()
    assert still == pytest.approx(1 - data.SHIFTED * 8 / 9, abs=0.06)


def test_batches_are_full_and_the_same_for_the_same_numbers() -> None:
    data = module("data")
    images = data.Images(torch.rand(70, 1, 8, 8), torch.arange(70))
    first, again = (list(data.batches(images, 32, torch.Generator().manual_seed(3))) for _ in range(2))
    assert [len(batch) for batch in first] == [32, 32]
    assert len({*torch.cat([batch.labels for batch in first]).tolist()}) == 64
    for ours, theirs in zip(first, again, strict=True):
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.pixels, theirs.pixels)


def test_processes_share_images_without_overlap() -> None:
    data, processes = module("data"), module("processes")
    images = data.Images(torch.rand(7, 1, 8, 8), torch.arange(7))
    parts = [processes.Processes(rank, 2).share(images).labels for rank in range(2)]
    assert [part.tolist() for part in parts] == [[0, 2, 4, 6], [1, 3, 5]]


def torchrun(script: Path, *options: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, script, *options], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes_stay_the_same_and_average_their_gradients(tmp_path: Path) -> None:
    printed = torchrun(HERE / "rednet_digits_rank.py", *QUICK, "--epochs", "1", "--out", str(tmp_path))
    epoch, told = printed.splitlines()  # the second process is silent
    assert epoch.startswith("epoch   1 of 1: ")
    answer = json.loads(told)
    assert answer["same_everywhere"]
    # Each element is a sum over images and pixels, in another order.
    assert answer["difference"]["evaluating"] < 1e4 * torch.finfo(torch.float64).eps
    # In training, batch normalisation takes each process's own statistics.
    assert answer["difference"]["training"] > 1e-3
    assert json.loads((tmp_path / "history.json").read_text())["configuration"]["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_reaches_98_percent(tmp_path: Path, processes: int) -> None:
    script, options = FOLDER / "train.py", ("--out", str(tmp_path))
    if processes == 1:
        subprocess.run([sys.executable, script, *options], check=True, timeout=300)
    else:
        torchrun(script, *options)
    assert contents(tmp_path) == FILES
    last = json.loads((tmp_path / "history.json").read_text())["history"][-1]
    assert last["epoch"] == 12
    assert last["accuracy"] >= 0.98


@pytest.mark.slow
def test_two_processes_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped from outside, at the end of its first epoch, has its checkpoint."""
    rank, options = HERE / "rednet_digits_rank.py", (*QUICK, "--epochs", "3", "--out")
    torchrun(rank, *options, str(tmp_path / "whole"))
    monkeypatch.setenv("STOP_AFTER", "1")
    torchrun(rank, *options, str(tmp_path / "parted"))
    assert len(loaded(tmp_path / "parted" / "last.pt")["state"]["history"]) == 1
    monkeypatch.delenv("STOP_AFTER")
    torchrun(rank, *options, str(tmp_path / "parted"), "--resume")
    parts = [loaded(tmp_path / name / "last.pt") for name in ("whole", "parted")]
    assert same(*parts)
