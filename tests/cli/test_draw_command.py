"""`opsmith draw` draws what a file holds, and says what is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import Result

from opsmith.cli.draw import draw

SOURCE = """
import torch, opsmith
from torch import Tensor

@opsmith.operator("{space}::twice")
def twice(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by

twice.gradients(x=lambda grad, by: grad * by)
twice.samples(lambda make: [(make(3, 2), 3.0)])

@opsmith.operator("{space}::bare")
def bare(x: Tensor) -> Tensor:
    return x + x

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x, *, shift):
        return twice(self.layer(x).exp()) + shift

network = Network()

def model():
    return network, (torch.ones(4, 3),), {"shift": torch.ones(2)}

def short():
    return network, torch.ones(4, 3)

def tensors():
    w = torch.ones(3, requires_grad=True)
    return {"first": w.exp(), "second": w.sin()}

def nothing():
    return 3

def of_one(x):
    return x * 2

def flat():
    return torch.ones(3)

def freed():
    y = torch.ones(3, requires_grad=True).exp()
    y.sum().backward()
    return y

tensor = torch.ones(3, requires_grad=True).exp()
"""


@pytest.fixture
def file(write: Callable[..., Path]) -> Path:
    return write(SOURCE)


@pytest.mark.parametrize("suffix", ["svg", "html", "json"])
def test_an_operator_is_drawn(
    opsmith: Callable[..., Result], file: Path, space: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"twice.{suffix}"
    done = opsmith("draw", f"{file}:twice", "-o", str(path))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{path}: {space}::twice: ")
    assert "on a call with by=3.0" in done.stdout
    assert f"{space}::twice" in path.read_text()


def test_a_model_is_drawn_and_who_keeps_most_is_named(
    opsmith: Callable[..., Result], file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.svg"
    done = opsmith("draw", f"{file}:model", "-o", str(path), "--training", "--depth", "0", "--show-attrs")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"{path}: training graph of Network: 10 nodes; keeps 80 B for the backward, "
        "32 B of it intermediate results",
        "  keep the most:",
        "  32 B ExpBackward0",
    ]
    assert "folded: 10 nodes in 5, 1 group closed" in path.read_text()


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_stdout_that_takes_nothing_is_told(
    closed: bool,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "twice.json"
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", None if closed else full)
        with pytest.raises(typer.Exit) as ended:
            draw(f"{file}:twice", output=path)
    said = capsys.readouterr().err
    assert ended.value.exit_code == 2
    assert ("there is no stdout" if closed else "got: No space left on device") in said
    assert path.exists() is not closed


def test_tensors_are_drawn(opsmith: Callable[..., Result], file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tensors.json"
    done = opsmith("draw", f"{file}:tensors", "-o", str(path), "--show-saved", "--json")
    read = json.loads(done.stdout)
    assert (read["path"], read["schema"], read["subject"]) == (str(path), 1, "autograd")
    assert [node["label"] for node in read["nodes"] if node["kind"] == "output"] == ["first", "second"]
    assert "saved" in {edge["kind"] for edge in read["edges"]}
    assert json.loads(path.read_text())["nodes"] == read["nodes"]
    done = opsmith("draw", f"{file}:tensor", "-o", str(path), "--no-memory", "--json")
    assert json.loads(done.stdout)["memory"] is False


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("flat", 1, "has no graph: none of its inputs requires a gradient"),
        ("freed", 1, "the graph was freed: the tensors that `ExpBackward0` saved are gone"),
        ("nothing", 2, "must return an object that can be drawn"),
        ("bare", 2, "it is drawn with the arguments of its first sample, but it has no samples"),
        ("network", 2, "is a model, and its arguments are missing"),
        ("short", 2, "`inputs` do not fit the module: missing a required "),
        ("missing", 2, "has no operator `missing`"),
    ],
)
def test_what_cannot_be_drawn(
    opsmith: Callable[..., Result], file: Path, name: str, status: int, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "graph.svg"
    done = opsmith("draw", f"{file}:{name}", "-o", str(path))
    assert (done.exit_code, done.stdout) == (status, "")
    assert words in done.stderr
    assert "hint:" in done.stderr or name == "missing"
    assert "Traceback" not in done.stderr
    assert not path.exists()


def test_the_path_is_looked_at_first(opsmith: Callable[..., Result], tmp_path: Path) -> None:
    done = opsmith("draw", "no_such_module:x", "-o", str(tmp_path / "graph.xyz"))
    assert done.exit_code == 2
    assert "a graph is not drawn in this format" in done.stderr
    done = opsmith("draw", "no_such_module:x", "-o", str(tmp_path / "gone" / "graph.svg"))
    assert done.exit_code == 2
    assert "there is no folder" in done.stderr


def test_a_target_without_a_name(opsmith: Callable[..., Result], file: Path, tmp_path: Path) -> None:
    done = opsmith("draw", str(file), "-o", str(tmp_path / "graph.svg"))
    assert done.exit_code == 2
    assert "must name an object to draw" in done.stderr


def test_a_picture_done_in_haste_is_told(
    opsmith: Callable[..., Result], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "opsmith.drawing.picture.render",
        lambda *_, **__: (b"<svg/>", "laid out in haste"),
    )
    done = opsmith("draw", f"{file}:tensor", "-o", str(tmp_path / "graph.svg"))
    assert done.exit_code == 0
    assert "  laid out in haste" in done.stdout.splitlines()


def test_a_function_that_needs_arguments_is_refused(
    opsmith: Callable[..., Result], file: Path, tmp_path: Path
) -> None:
    done = opsmith("draw", f"{file}:of_one", "-o", str(tmp_path / "graph.svg"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert ":of_one` cannot be called without arguments: missing a required argument: 'x'" in done.stderr
    assert "got: it takes `(x)`" in done.stderr
    assert "Traceback" not in done.stderr
