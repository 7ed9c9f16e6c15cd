"""`opsmith build --torch-library` writes a library of the operators that are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from opsmith.build.processor import levels

FILE = Path(__file__).parents[1] / "shipping" / "served_operators.py"
Command = Callable[..., Result]
DOUBLED = """
import opsmith
from torch import Tensor

@opsmith.operator("served_by_command::doubled", shapes="x: N -> N")
def doubled(x: Tensor) -> Tensor:
    return (2 * x).contiguous()

doubled.kernel(
    "cuda",
    cuda="__global__ void doubled(View<const float, 1> x, View<float, 1> y) "
    "{ OPSMITH_EACH(i, y.numel()) y(i) = 2 * x(i); }",
    grid="ceil(x.numel / 256)",
)
doubled.samples(lambda make: [(make(3),)])
"""
pytestmark = pytest.mark.skipif(not levels(), reason="no level of this machine's processors is known")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.slow
def test_operators_of_several_targets_are_in_one_library(opsmith: Command, tmp_path: Path) -> None:
    library = tmp_path / "libmine.so"
    targets = [f"{FILE}:add_into", f"{FILE}:increase_", f"{FILE}:add_into"]
    done = opsmith("build", *targets, "--torch-library", str(library))
    assert done.exit_code == 0, done.output
    size = f"{library.stat().st_size / 1000:.0f} kB in {library}"
    assert done.stdout.splitlines() == ["served::add_into", "served::increase__void", size]


def test_as_json_for_one_level(opsmith: Command, tmp_path: Path) -> None:
    level, library = next(iter(levels())), tmp_path / "libmine.so"
    words = [f"{FILE}:add_into", "--torch-library", str(library), "--cpu", level, "--json"]
    done = opsmith("build", *words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "schema": 1,
        "library": str(library),
        "served": ["served::add_into"],
        "cuda": [],
        "inlined": [],
    }


@pytest.mark.slow
def test_with_kernels_for_gpus(opsmith: Command, tmp_path: Path) -> None:
    source = tmp_path / "doubled.py"
    source.write_text(DOUBLED)
    library = tmp_path / "libmine.so"
    done = opsmith("build", str(source), "--torch-library", str(library), "--cuda", "sm_90")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == "served_by_command::doubled, with kernels for GPUs"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "name the operators for a library for torch"),
        ([f"{FILE}:none"], 2, "none"),
        ([f"{FILE}:add_into", "--cpu", "x86-64-v2,x86-64-v3"], 2, "is compiled for one level of processors"),
        ([f"{FILE}:add_into", "--cpu", "z80"], 2, "there is no level `z80` of linux-x86_64 processors"),
        ([f"{FILE}:add_into", "--verify"], 2, "`--verify` is not for a library for torch"),
        ([f"{FILE}:add_into", "--cuda", "gpu"], 2, "`gpu` is not an architecture of GPUs"),
        ([f"{FILE}:add_into", "-o", "here"], 2, "`--output` is not for a library for torch"),
    ],
)
def test_bad_input(opsmith: Command, tmp_path: Path, words: list[str], status: int, message: str) -> None:
    done = opsmith("build", *words, "--torch-library", str(tmp_path / "libmine.so"))
    assert done.exit_code == status, done.output
    assert message in done.stderr
    assert [*tmp_path.iterdir()] == []


RANDOM = """
import opsmith, torch
from torch import Tensor

@opsmith.operator("unserved_by_command::noisy", random=True)
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)
"""


def test_what_cannot_be_served_is_a_failure(opsmith: Command, tmp_path: Path) -> None:
    file, library = tmp_path / "noisy_operator.py", tmp_path / "libmine.so"
    file.write_text(RANDOM)
    done = opsmith("build", str(file), "--torch-library", str(library))
    assert done.exit_code == 1, done.output
    assert "it draws from torch's random state" in done.stderr
    assert not library.exists()


def test_one_package_is_built_at_a_time(opsmith: Command) -> None:
    done = opsmith("build", "one", "two")
    assert done.exit_code == 2
    assert "one package is built at a time" in done.stderr
