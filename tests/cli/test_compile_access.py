"""`opsmith compile --access` shows by line how CUDA C++ kernels access memory, without NVRTC and a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from opsmith.kernels.cuda import nvrtc

FILE = """
import torch, opsmith
from torch import Tensor

@opsmith.operator("{space}::twice")
def twice(x: Tensor) -> Tensor:
    return x[::2] + 0

twice.kernel("cuda", grid=1, block=32, cuda='''
__global__ void twice(Contiguous<const float> x, Contiguous<float> y) {
  const int i = threadIdx.x;
  y[i] = x[2 * i];
  MORE
}
''')
twice.samples(lambda: [(torch.ones(64),)])
{more}
"""
TABLE = """\
{space}::twice (1 call)
  {file}:12  y[i] = x[2 * i];
    ×2.0   reads x                        1 requests of 32.0 lanes, 8.0 sectors each
    ×1.0   writes result                  1 requests of 32.0 lanes, 4.0 sectors each

a model of a GPU, from runs on the CPU: without caches and times; a sector is 32 bytes of global memory, \
and wavefronts are of shared memory; a ratio divides their number by the smallest possible number
"""


@pytest.fixture
def written(write: Callable[..., Path]) -> Callable[..., Path]:
    def written(statement: str = "", more: str = "") -> Path:
        return write(FILE.replace("MORE", statement).replace("{more}", more))

    return written


@pytest.fixture(autouse=True)
def without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: ())


@pytest.mark.slow
def test_lines_with_their_ratio(
    written: Callable[..., Path], opsmith: Callable[..., Result], space: str
) -> None:
    file = written()
    done = opsmith("compile", str(file), "--access")
    assert done.exit_code == 0, done.output
    assert done.stdout == TABLE.format(space=space, file=file.name)


@pytest.mark.slow
def test_json(written: Callable[..., Path], opsmith: Callable[..., Result], space: str) -> None:
    file = written()
    done = opsmith("compile", str(file), "--access", "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["access"]["passed"], answer["access"]["refused"]) == (1, True, [])
    assert "without caches and times" in answer["access"]["model"]
    (kernel,) = answer["access"]["kernels"]
    worst, best = kernel.pop("lines")
    assert kernel == {
        "operator": f"{space}::twice",
        "where": f"{file}:10",
        "kernel": "twice",
        "dtype": "",
        "calls": 1,
    }
    assert worst == {
        "where": f"{file}:12",
        "line": "y[i] = x[2 * i];",
        "use": "reads",
        "memory": "global",
        "tensor": "x",
        "requests": 1,
        "lanes": 32,
        "unit": "sectors",
        "taken": 8,
        "fewest": 4,
        "ratio": 2.0,
    }
    assert (best["tensor"], best["use"], best["ratio"]) == ("result", "writes", 1.0)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("statement", "status", "said"),
    [
        ('asm("trap;");', 2, "inline PTX is not emulated"),
        ("y[i + 1] = 0;", 1, "the CUDA kernel is faulty: out-of-bounds"),
        ("while (y.data) {}", 1, "the CUDA kernel is faulty: endless"),
    ],
    ids=["cannot be run", "at fault", "endless"],
)
def test_a_kernel_that_is_not_counted(
    written: Callable[..., Path],
    opsmith: Callable[..., Result],
    space: str,
    statement: str,
    status: int,
    said: str,
) -> None:
    done = opsmith("compile", str(written(statement)), "--access", "--json")
    assert done.exit_code == status, done.output
    assert f"{space}::twice" in done.stderr
    assert said in done.stderr
    answer = json.loads(done.stdout)["access"]
    assert (answer["passed"], answer["kernels"]) == (False, [])
    (refused,) = answer["refused"]
    assert said in refused["message"]


def test_a_kernel_that_takes_no_sample(
    written: Callable[..., Path], opsmith: Callable[..., Result], space: str
) -> None:
    done = opsmith(
        "compile", str(written(more="twice.samples(lambda: [(torch.ones(64).int(),)])")), "--access"
    )
    assert done.exit_code == 2
    assert (
        f"{space}::twice: its kernel in CUDA C++ takes none of the samples, so nothing is run" in done.stderr
    )
    assert "got: `x` is int32, but the kernel takes float32" in done.stderr
    assert "hint: in `@twice.samples`, yield arguments that the kernel takes" in done.stderr


def test_it_is_for_no_architecture(written: Callable[..., Path], opsmith: Callable[..., Result]) -> None:
    done = opsmith("compile", str(written()), "--access", "--arch", "sm_90")
    assert done.exit_code == 2
    assert "`--access` runs kernels on the CPU, so it takes no `--arch`" in done.stderr
    assert "hint: leave one of them out" in done.stderr


def test_no_kernel_in_cuda_cpp(
    write: Callable[..., Path], opsmith: Callable[..., Result], space: str
) -> None:
    text = FILE.partition("twice.kernel")[0]
    file = write(text)
    done = opsmith("compile", str(file), "--access")
    assert done.exit_code == 2
    assert f"no operator of `{file}` has a kernel in CUDA C++" in done.stderr
    assert "kernels in Triton have no access model" in done.stderr
