"""Options that the example which trains a RedNet refuses before it begins."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from rednet_digits_run import command, contents, module

pytestmark = pytest.mark.usefixtures("on_the_path")

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
