"""The plane that the linear operator learns."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from opsmith.ops import Linear
from opsmith.tour import TourContext, linear_fit


def context(out: Path, steps: int, seed: int = 0) -> TourContext:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TourContext(out, device, Console(file=io.StringIO(), width=100), linear_steps=steps, seed=seed)


def test_300_steps(tmp_path: Path) -> None:
    given = context(tmp_path, 300)
    result = linear_fit.run(given)
    assert result.passed
    assert result.headline == f"off by {result.details['error']:.4f} after 300 steps (allowed: 0.05)"
    assert isinstance(given.console.file, io.StringIO)
    printed = given.console.file.getvalue()
    for name, value in zip(("w1", "w2", "b"), result.details["learned"], strict=True):
        assert f"{name} " in printed
        assert f"{value:.4f}" in printed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_5000_steps(tmp_path: Path, seed: int) -> None:
    result = linear_fit.run(context(tmp_path, 5000, seed))
    w1, w2, b = result.details["learned"]
    assert result.passed
    assert ((w1 - 2) ** 2 + (w2 - 3) ** 2) ** 0.5 < 0.02
    assert abs(b - 4) < 0.02
    # The descent ends at the optimum under weight decay, closer than that is to the target.
    assert torch.tensor(result.details["learned"]).allclose(linear_fit.optimum().float(), rtol=0, atol=1e-3)


def test_too_few_steps_do_not_pass(tmp_path: Path) -> None:
    assert not linear_fit.run(context(tmp_path, 20)).passed


def test_files(tmp_path: Path) -> None:
    result = linear_fit.run(context(tmp_path, 1200))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linear.json", "linear.pt"]
    assert sorted(result.files) == sorted(tmp_path.iterdir())
    written = json.loads((tmp_path / "linear.json").read_text())
    assert written["curve"]["step"][0] == 1
    assert written["curve"]["step"][-1] == 1200
    assert len(written["curve"]["loss"]) == len(written["curve"]["step"]) <= 601
    assert written["curve"]["loss"][-1] < 1e-3 < written["curve"]["loss"][0]
    model = Linear(2, 1, dtype=torch.float64)
    model.load_state_dict(torch.load(tmp_path / "linear.pt"))
    assert [*model.weight.flatten().tolist(), model.bias.item()] == written["learned"]
