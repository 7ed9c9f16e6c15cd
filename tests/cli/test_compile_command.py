"""`opsmith compile` compiles CUDA kernels without a GPU, and holds them to their limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from opsmith.kernels.cuda import nvrtc

KERNELS = """
import torch, opsmith
from torch import Tensor

SIZE = "x.shape[0]"

@opsmith.operator("{space}::twice")
def twice(x: Tensor) -> Tensor:
    return x + x

twice.kernel("cuda", grid="ceil(result.numel / 128)", block=128, {words} constants={"N": SIZE}, cuda='''
template <class T, int N>
__global__ void twice(Contiguous<const T> x, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] {plus} x[i];
}
''')
{samples}

@opsmith.operator("{space}::plain")
def plain(x: Tensor) -> Tensor:
    return x + x
"""
SAMPLES = "twice.samples(lambda make: [(make(3),), (make(5, 2),)])"


@pytest.fixture
def kernels(write: Callable[..., Path]) -> Callable[..., Path]:
    def kernels(*, words: str = "", plus: str = "+", samples: str = SAMPLES) -> Path:
        text = KERNELS.replace("{words}", words).replace("{plus}", plus).replace("{samples}", samples)
        return write(text)

    return kernels


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_what_each_instance_takes(
    kernels: Callable[..., Path], opsmith: Callable[..., Result], space: str
) -> None:
    done = opsmith("compile", str(kernels()), "--arch", "sm_80", "--arch", "sm_90")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().startswith(f"{space}::")]
    assert [row[:4] for row in rows] == [
        [f"{space}::twice", f"{dtype},", f"N={size}", architecture]
        for architecture in ("sm_80", "sm_90")
        for dtype in ("float32", "float64")
        for size in (3, 5)
    ]
    for *_, registers, spills, shared, threads, occupancy in rows:
        assert 8 <= int(registers) <= 64
        assert (spills, shared, threads, occupancy) == ("0", "0", "128", "100%")
    assert done.stdout.splitlines()[-1] == "1 kernel compiled"


@pytest.mark.slow
def test_json(kernels: Callable[..., Path], opsmith: Callable[..., Result], space: str) -> None:
    file = kernels()
    done = opsmith("compile", f"{file}:twice", "--arch", "sm_90", "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["architectures"], answer["passed"]) == (1, ["sm_90"], True)
    assert answer["refused"] == []
    first = answer["kernels"][0]
    registers = first.pop("registers")
    assert registers > 0
    assert first == {
        "operator": f"{space}::twice",
        "where": f"{file}:13",
        "kernel": "twice",
        "instance": "float32, N=3",
        "architecture": "sm_90",
        "spill_stores": 0,
        "spill_loads": 0,
        "stack": 0,
        "shared": 0,
        "dynamic_shared": 0,
        "threads": 128,
        "occupancy": 1.0,
        "faults": [],
    }


@pytest.mark.slow
def test_a_limit_that_is_not_kept(
    kernels: Callable[..., Path], opsmith: Callable[..., Result], space: str
) -> None:
    done = opsmith("compile", str(kernels(words="max_registers=2, max_spills=0,")), "--arch", "sm_90")
    assert done.exit_code == 1
    assert f"{space}::twice, float32, N=3, sm_90: it takes " in done.stdout
    assert "registers, and max_registers is 2\n" in done.stdout
    assert "max_spills is" not in done.stdout
    assert done.stdout.splitlines()[-1] == "1 of 1 kernel failed"


@pytest.mark.slow
def test_a_block_that_fits_on_no_multiprocessor(
    kernels: Callable[..., Path], opsmith: Callable[..., Result]
) -> None:
    done = opsmith("compile", str(kernels(words="shared=200_000,")), "--arch", "sm_80", "--arch", "sm_90")
    assert done.exit_code == 1
    assert "sm_80: a multiprocessor has no room for a block of 128 threads, " in done.stdout
    assert "200000 bytes of shared memory" in done.stdout
    assert "sm_90: a multiprocessor" not in done.stdout


def test_a_compile_error(kernels: Callable[..., Path], opsmith: Callable[..., Result]) -> None:
    file = kernels(plus="+ more *")
    done = opsmith("compile", str(file), "--arch", "sm_90", "--json")
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert (answer["passed"], answer["kernels"]) == (False, [])
    (refused,) = answer["refused"]
    assert f'{file}:14:44: identifier "more" is undefined' in refused["message"]
    assert "NVRTC refuses the kernel" in done.stderr


def test_constants_that_no_sample_tells(kernels: Callable[..., Path], opsmith: Callable[..., Result]) -> None:
    done = opsmith("compile", str(kernels(samples="")))
    assert done.exit_code == 2  # there is nothing that could be compiled
    assert "but no sample gives sizes in float32, float64" in done.stderr
    assert done.stdout.splitlines()[-1] == "1 of 1 kernel failed"


def test_without_samples_constants_that_are_numbers_are_enough(
    write: Callable[..., Path], opsmith: Callable[..., Result]
) -> None:
    text = KERNELS.replace('"x.shape[0]"', "4").replace("{words}", "").replace("{plus}", "+")
    done = opsmith("compile", str(write(text.replace("{samples}", ""))), "--arch", "sm_90", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["kernels"]
    assert [(each["instance"], each["threads"]) for each in found] == [
        ("float32, N=4", None),
        ("float64, N=4", None),
    ]


@pytest.mark.slow
def test_a_dtype_that_no_sample_reaches_is_compiled_too(
    write: Callable[..., Path], opsmith: Callable[..., Result]
) -> None:
    text = KERNELS.replace('"x.shape[0]"', "4").replace("{words}", "").replace("{plus}", "+")
    samples = "twice.samples(lambda: [(torch.ones(3),)])"
    done = opsmith("compile", str(write(text.replace("{samples}", samples))), "--arch", "sm_90", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["kernels"]
    assert [(each["instance"], each["threads"]) for each in found] == [
        ("float32, N=4", 128),
        ("float64, N=4", None),
    ]


def test_a_dtype_that_no_sample_reaches_and_whose_constants_depend_on_sizes(
    kernels: Callable[..., Path], opsmith: Callable[..., Result]
) -> None:
    file = kernels(samples="twice.samples(lambda: [(torch.ones(3),)])")
    done = opsmith("compile", str(file), "--arch", "sm_90")
    assert done.exit_code == 2
    assert "but no sample gives sizes in float64" in done.stderr


@pytest.mark.slow
def test_a_kernel_in_triton_needs_no_nvrtc(
    opsmith: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: ())
    example = Path(__file__).parents[2] / "examples" / "softmax_in_triton.py"
    file = (
        tmp_path / "softmax_without_nvrtc.py"
    )  # this process may have the example loaded, and its name taken
    file.write_text(
        example.read_text(encoding="utf-8").replace("examples::", "without_nvrtc::"), encoding="utf-8"
    )
    done = opsmith("compile", str(file), "--arch", "sm_90", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["passed"], told["nvrtc"]) == (True, None)
    assert {each["architecture"] for each in told["kernels"]} == {"sm_90"}
    assert all(each["registers"] > 0 and each["spill_stores"] == 0 for each in told["kernels"])


TRITON = """
import opsmith, torch, triton, triton.language as tl

@triton.jit
def doubled(x, result, x_numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, tl.load(x + at, mask=at < x_numel) * 2, mask=at < x_numel)

@opsmith.operator("{space}::double")
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

double.samples(lambda: [({sample},)])
double.kernel("cuda", triton=doubled, grid=1, constants={{"BLOCK": 64}}, dtypes=[torch.float16])
"""


def test_a_kernel_in_triton_that_takes_no_sample(
    tmp_path: Path, opsmith: Callable[..., Result], space: str
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")
    file = tmp_path / f"{space}_complex.py"
    file.write_text(TRITON.format(space=space, sample="torch.ones(8, dtype=torch.complex64)"))
    done = opsmith("compile", str(file), "--arch", "sm_90")
    assert done.exit_code == 2, done.output
    assert f"{space}::double: its Triton kernel takes none of the samples" in done.stderr
    assert "got: `x` is complex64, but the kernel takes float16\n" in done.stderr
    assert "hint: in `@double.samples`, yield arguments that the kernel takes" in done.stderr
    assert done.stdout.splitlines()[-1] == "1 of 1 kernel failed"


def test_samples_of_another_dtype_are_cast_to_that_of_a_kernel_in_triton(
    tmp_path: Path, opsmith: Callable[..., Result], space: str
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")
    file = tmp_path / f"{space}_half.py"
    file.write_text(TRITON.format(space=space, sample="torch.ones(8)"))
    done = opsmith("compile", str(file), "--arch", "sm_90", "--json")
    assert done.exit_code == 0, done.output
    [used] = json.loads(done.stdout)["kernels"]
    assert "x: *fp16, result: *fp16" in used["instance"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arch", "sm_9"], "does not compile for `sm_9`"),
        (["--arch", "sm_90", "nowhere.py"], "nowhere.py"),
    ],
)
def test_what_cannot_be_carried_out(
    words: list[str], said: str, kernels: Callable[..., Path], opsmith: Callable[..., Result]
) -> None:
    done = opsmith("compile", str(kernels()), *words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_no_cuda_kernel_at_all(
    kernels: Callable[..., Path], opsmith: Callable[..., Result], space: str
) -> None:
    done = opsmith("compile", f"{kernels()}:plain")
    assert done.exit_code == 2
    assert f"no operator of `{kernels()}:plain` has a CUDA kernel" in done.stderr


def test_without_nvrtc(
    kernels: Callable[..., Path], opsmith: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: ())
    done = opsmith("compile", str(kernels()))
    assert done.exit_code == 2
    assert "there is no NVRTC, which compiles CUDA C++" in done.stderr


@pytest.mark.slow
def test_at_80_columns_no_heading_breaks(
    kernels: Callable[..., Path], opsmith: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = opsmith("compile", str(kernels()), "--arch", "sm_80")
    assert done.exit_code == 0, done.output
    headings = done.stdout.splitlines()[0].split()
    assert headings == ["kernel", "for", "registers", "spills", "shared", "threads", "occupancy"]
