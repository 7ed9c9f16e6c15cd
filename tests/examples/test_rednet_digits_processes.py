"""The example that trains a RedNet, whole: in one process and in two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rednet_digits_run import FILES, FOLDER, QUICK, contents, loaded, module, same

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("on_the_path")


def test_processes_share_images_without_overlap() -> None:
    data, processes = module("data"), module("processes")
    images = data.Images(torch.rand(7, 1, 8, 8), torch.arange(7))
    parts = [processes.Processes(rank, 2).share(images).labels for rank in range(2)]
    assert [part.tolist() for part in parts] == [[0, 2, 4, 6], [1, 3, 5]]


def torchrun(script: Path, *options: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, script, *options], capture_output=True, text=True, check=False)
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
        subprocess.run([sys.executable, script, *options], check=True)
    else:
        torchrun(script, *options)
    assert contents(tmp_path) == FILES
    last = json.loads((tmp_path / "history.json").read_text())["history"][-1]
    assert last["epoch"] == 15
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
