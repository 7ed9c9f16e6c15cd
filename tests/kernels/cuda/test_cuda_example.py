"""The example's kernels compile for every GPU that is asked for, and compute what their references do."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_driver import emulate, forget, instances, on_cpu, record
from torch.testing import assert_close
from typer.testing import CliRunner

from opsmith.cli.app import app
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.kernel import CudaKernel

EXAMPLE = Path(__file__).parents[3] / "examples" / "involution_cuda.py"
SIZES = [(3, 2), (7, 1)]
"""Of the kernel, and its stride."""
DTYPES = [torch.float32, torch.bfloat16]


def copied(folder: Path, space: str) -> Path:
    """The example with names of its own: what tests examples imports it, too."""
    shutil.copy(EXAMPLE.with_name("involution.cu"), folder)
    file = folder / f"{space}.py"
    file.write_text(EXAMPLE.read_text().replace('"examples::', f'"{space}::'))
    return file


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    file = copied(tmp_path_factory.mktemp("example"), "involution_on_cpu")
    specification = importlib.util.spec_from_file_location("involution_on_cpu", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    kernels = [on_cpu(each) for each in (module.involution, module.grad_x, module.grad_weight)]
    constants = [(("K", size), ("S", stride)) for size, stride in SIZES]
    emulate({kernel: [*_needed(kernel, constants)] for kernel in kernels})
    forget(dry=False)
    yield module
    forget()


def _needed(kernel: CudaKernel, constants: list[Any]) -> Iterator[Instance]:
    return (each for each in instances(kernel, *constants) if each.dtype in DTYPES)


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "stride"), SIZES)
def test_forward_and_gradients(example: ModuleType, size: int, stride: int, dtype: torch.dtype) -> None:
    before = record().launches
    padding = size // 2
    x = torch.randn(2, 6, 9, 8)
    rows, columns = (9 - 1) // stride + 1, (8 - 1) // stride + 1
    weight = torch.randn(2, 3, size, size, rows, columns)
    arguments: tuple[Any, ...] = (x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_())
    y = example.involution(*arguments, stride, padding)
    dy = torch.randn(y.shape).to(dtype)
    found = y, *torch.autograd.grad(y, arguments, dy)
    assert record().launches == before + 3
    wide = [each.detach().double().requires_grad_() for each in arguments]
    right = example.involution.reference(*wide, stride, padding)
    expected = right, *torch.autograd.grad(right, wide, dy.double())
    epsilon = torch.finfo(dtype).eps
    for one, two in zip(found, expected, strict=True):
        assert_close(
            one.double(), two, atol=16 * epsilon * float(two.detach().abs().max()), rtol=16 * epsilon
        )


@pytest.mark.slow
def test_it_compiles_without_a_gpu_and_spills_nothing(tmp_path: Path) -> None:
    file = copied(tmp_path, "involution_compiled")
    done = CliRunner().invoke(app, ["compile", str(file), "--arch", "sm_80", "--arch", "sm_90", "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["passed"]
    assert {(each["kernel"], each["architecture"]) for each in answer["kernels"]} == {
        (name, architecture)
        for name in ("involution", "involution_grad_x", "involution_grad_weight")
        for architecture in ("sm_80", "sm_90")
    }
    for each in answer["kernels"]:
        assert each["spill_stores"] == each["spill_loads"] == 0
        assert 16 <= each["registers"] <= 64
        assert each["threads"] == 256
        assert 0.5 <= each["occupancy"] <= 1
