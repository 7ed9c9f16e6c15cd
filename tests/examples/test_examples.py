"""Every example runs, asserts what it shows, is short enough to copy, and its operators pass the check."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import opsmith

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


SLOW = {"distributed", "histogram_cuda", "hot_reload", "involution_cuda", "matmul_cuda", "softmax_cuda"}
"""Examples of what other tests run, too: DTensor, reloading, and CUDA kernels that are emulated."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in SLOW else ())
        for path in EXAMPLES
    ],
)
def example(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    path: Path = request.param
    if "triton" in path.stem:
        pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")
    specification = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules[module.__name__]


def operators(example: ModuleType) -> list[opsmith.Operator[..., object]]:
    return opsmith.declared_operators(example.__name__)


def test_these_are_the_examples() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "add_constant",
        "distributed",
        "dropout",
        "histogram_cuda",
        "hot_reload",
        "involution_cuda",
        "layer_norm",
        "matmul_cuda",
        "numpy_routine",
        "quick_start",
        "softmax_cuda",
        "softmax_in_triton",
        "straight_through",
        "transpose",
    }


def test_runs(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert printed.err == ""


def test_is_short(example: ModuleType) -> None:
    assert example.__file__ is not None
    assert len(Path(example.__file__).read_text().splitlines()) < 60


# torch warns of its own deprecated names when it first loads the formulas of forward mode.
@pytest.mark.every(6)
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
def test_passes_the_check(example: ModuleType) -> None:
    if not operators(example):  # it declares them while it runs
        example.main()
    assert operators(example)
    for operator in operators(example):
        report = opsmith.check(operator, effort="quick")  # at the default effort in tests of the JSON
        assert report.passed, str(report)
