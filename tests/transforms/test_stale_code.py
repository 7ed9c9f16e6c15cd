"""No stale code: a process uses what another left compiled on disk only where the sources agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from torch import Tensor

import opsmith

GLOBAL = {global_value}

def helper(grad, w):
    return grad * w * {helper_value}

def formula_with(closed_over):
    return lambda grad, w: helper(grad, w) * closed_over * GLOBAL * {formula_value}

@opsmith.operator("stale::scaled")
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w * {reference_value}

scaled.gradients(x=formula_with({closure_value}))

x = torch.ones(4, requires_grad=True)
y = torch.compile(scaled, fullgraph=True)(x, torch.ones(4))
(gradient,) = torch.autograd.grad(y.sum(), x)
from torch._dynamo.utils import counters
hits = counters["aot_autograd"]["autograd_cache_hit"]
print(f"{{y[0].item():g}} {{gradient[0].item():g}} {{hits}}")
"""
WRITING = """
import torch
from torch import Tensor

import opsmith

@opsmith.operator("stale::doubled", mutates=["x"])
def doubled(x: Tensor) -> None:
    x.mul_(2)

doubled.kernel("cpu", lambda x: None if x.mul_(2) is x else None)

@torch.compile(fullgraph=True, dynamic=True)
def step(cache: Tensor, layer: int) -> Tensor:
    doubled(cache[layer])
    return cache.sum()

cache = torch.ones(3, 4)
print(*(f"{step(cache, layer).item():g}" for layer in (1, 2)))
"""
"""A view at an offset that changes: compiled code computes the functional form, and copies back."""
VALUES = {"global_value": 1, "helper_value": 1, "formula_value": 1, "reference_value": 1, "closure_value": 1}


def run(folder: Path, **changed: int) -> list[str]:
    return output_of(folder, PROGRAM.format(**{**VALUES, **changed}))


def output_of(folder: Path, text: str) -> list[str]:
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stale")
    assert run(folder) == ["1", "1", "0"]
    return folder


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.xdist_group("stale")
def test_the_same_sources_find_their_code(folder: Path) -> None:
    assert run(folder) == ["1", "1", "1"]


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.xdist_group("stale")
def test_another_closure_is_compiled_anew(folder: Path) -> None:
    assert run(folder, closure_value=5) == ["1", "5", "0"]


# Each of these is a process of its own that compiles, 10 seconds.
@pytest.mark.slow
@pytest.mark.xdist_group("stale")
@pytest.mark.parametrize("place", ["formula", "global", "helper"])
def test_another_formula_is_compiled_anew(folder: Path, place: str) -> None:
    assert run(folder, **{f"{place}_value": 5}) == ["1", "5", "0"]


@pytest.mark.slow
@pytest.mark.xdist_group("stale")
def test_another_reference_is_compiled_anew(folder: Path) -> None:
    assert run(folder, reference_value=5) == ["5", "1", "0"]


@pytest.mark.slow
@pytest.mark.xdist_group("stale")
def test_code_of_another_process_finds_the_functional_form(folder: Path) -> None:
    for _ in range(2):
        assert output_of(folder, WRITING) == ["16", "20"]
