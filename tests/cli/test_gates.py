"""What did not run is never passed: each tool is taken away, and status, JSON and words of a check agree."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from opsmith import errors
from opsmith.kernels.triton import interpreter

Write = Callable[..., Path]
Run = Callable[..., Result]
ONLY = [word for name in ("forward", "gradient", "cuda", "triton") for word in ("--only", name)]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: its kernels run"),
    pytest.mark.xdist_group("gates"),
]

PLAIN = """
import opsmith, torch
from torch import Tensor

@opsmith.operator("{space}::gated")
def gated(x: Tensor) -> Tensor:
    return x * 2

gated.samples(lambda make: [(make(3),), (make(4),)])
"""
CPP = """
gated.kernel("cpu", cpp='''
template <class T> void gated(View<const T, 1> x, View<T, 1> y) {
  for (int64_t i = 0; i < x.numel(); i++) y(i) = T(2) * x(i);
}
''')
"""
CUDA = """
gated.kernel("cuda", grid=1, block=32, cuda='''
template <class T> __global__ void gated(Contiguous<const T> x, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * T(2);
}
''')
"""
PTX = CUDA.replace("OPSMITH_EACH", 'asm volatile("bar.sync 0;");\n  OPSMITH_EACH')
WRONG_CUDA = CUDA.replace("OPSMITH_EACH", "int n = 1\n  OPSMITH_EACH")
WRONG_CPP = CPP.replace("T(2) * x(i)", "T(2) * z(i)")
TRITON = """
import triton
import triton.language as tl

@triton.jit
def doubled(x, result, x_numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, 2 * tl.load(x + at, mask=at < x_numel), mask=at < x_numel)

gated.kernel("cuda", triton=doubled, constants={"BLOCK": 4},
             grid=lambda x, BLOCK: (triton.cdiv(x.numel(), BLOCK),))
"""
IN_PYTHON = """
@gated.kernel("cuda")
def in_python(x: Tensor) -> Tensor:
    return x + x
"""
FOR_HALVES = CPP.replace("''')", "''', dtypes=[torch.int32])")


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise errors.ToolchainError("Triton is not installed", hint="`pip install triton`")

    monkeypatch.setattr(interpreter, "triton_module", missing)


def refusal(device: str) -> str:
    """The words of torch where a device is missing: builds for CUDA and for the CPU have their own."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return ""


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every tool."""


def as_chosen(run: Run, file: Path, *options: str) -> tuple[Result, dict[str, Any]]:
    """The text of a check, and the report with `--json`; its status is 0 if nothing failed that was asked."""
    words = ["check", f"{file}:gated", "--quick", *options]
    shown, done = run(*words), run(*words, "--json")
    document = json.loads(done.stdout)
    assert document["passed"] is (done.exit_code == 0) is (shown.exit_code == 0)
    (report,) = document["reports"]
    assert bool(report["unverified"]) is ("; unverified: " in shown.stdout.replace("\n", " "))
    return shown, report


def checked(run: Run, file: Path, *options: str) -> tuple[Result, dict[str, Any]]:
    """The text of a check, and the report of the same check with `--json`."""
    words = ["check", f"{file}:gated", "--quick", *ONLY, *options]
    shown, done = run(*words), run(*words, "--json")
    assert shown.exit_code == done.exit_code, shown.output
    document = json.loads(done.stdout)
    assert document["passed"] is (done.exit_code == 0)
    (report,) = document["reports"]
    assert report["passed"] is document["passed"]
    return shown, report


@pytest.mark.parametrize(
    ("kernels", "without", "named", "reason"),
    [
        (CPP, no_compiler, "C++ kernel at", "there is no C++ compiler: no `no-such-compiler` in PATH"),
        pytest.param(
            CUDA,
            no_compiler,
            "CUDA kernel at",
            "there is no C++ compiler: no `no-such-compiler` in PATH",
            marks=pytest.mark.slow,
        ),
        (TRITON, no_triton, "Triton kernel at", "Triton is not installed"),
        (PTX, nothing, "CUDA kernel at", "inline PTX is not emulated"),
        pytest.param(IN_PYTHON, nothing, "kernel for `cuda` at", refusal("cuda"), marks=pytest.mark.slow),
        (FOR_HALVES, nothing, "C++ kernel at", "it takes none of the samples (`x` is "),
        pytest.param(
            CPP + FOR_HALVES.replace("gated(View", "other(View").replace("dtypes=", "entry='other', dtypes="),
            nothing,
            "C++ kernel at",
            "it takes none of the samples (`x` is ",
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "C++ without a compiler",
        "CUDA without a compiler",
        "Triton that is missing",
        "inline PTX",
        "Python for a device that is missing",
        "C++ that takes no sample",
        "the second of two kernels",
    ],
)
def test_a_kernel_that_ran_on_no_sample_is_named_and_fails_a_strict_check(
    kernels: str,
    without: Callable[[pytest.MonkeyPatch], None],
    named: str,
    reason: str,
    opsmith: Run,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    space: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    file = write(PLAIN + kernels)
    without(monkeypatch)
    for options, status in (((), 0), (("--strict",), 1)):
        shown, report = checked(opsmith, file, *options)
        assert shown.exit_code == status, shown.output
        (name,) = report["unverified"]
        assert name.startswith(f"{named} {file.name}:")
        assert reason in name
        assert (report["errors"], report["warnings"], report["limits"]) == (0, 0, 1)
        ((outcome, failure),) = [(one, each) for one in report["outcomes"] for each in one["failures"]]
        verdict = f"FAILED: {outcome['property']}" if options else "passed"
        assert shown.stdout.startswith(f"{space}::gated: {verdict}; 1 limit; unverified: {name}\n")
        assert (failure["cause"], failure["severity"]) == ("not-exercised", "limit")
        assert failure["where"].startswith(f"{file}:")
        line = rf"^  {outcome['property']} +{outcome['word']} "
        if outcome["word"] == "skipped":
            line = rf"^  skipped: \d+\n(    .*\n)*    .*\b{outcome['property']}\b.*: "
        assert re.search(line, shown.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "chosen",
    [
        "--only gradient",
        pytest.param("--only layouts", marks=pytest.mark.slow),
        pytest.param("--only forward,layouts", marks=pytest.mark.slow),
        pytest.param("--only linearity,vmap --only layouts", marks=pytest.mark.slow),
        pytest.param("--only layouts --isolate", marks=pytest.mark.slow),
        pytest.param("--skip forward", marks=pytest.mark.slow),
        pytest.param("--skip forward,layouts,cuda", marks=pytest.mark.slow),
        pytest.param("--only opcheck", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_that_ran_on_no_sample_is_named_whatever_is_chosen(
    chosen: str, opsmith: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(PLAIN + CPP)
    with monkeypatch.context() as within:
        no_compiler(within)
        for strict, status in ((), 0), (["--strict"], 1):
            shown, report = as_chosen(opsmith, file, *chosen.split(), *strict)
            assert shown.exit_code == status, shown.output
            (name,) = report["unverified"]
            assert name.startswith(f"C++ kernel at {file.name}:")
            assert "(there is no C++ compiler: no `no-such-compiler` in PATH)" in name
            assert report["limits"] == 1
    there = write((PLAIN + CPP).replace("{space}", "{space}_there"), name="there.py")
    shown, report = as_chosen(opsmith, there, *chosen.split(), "--strict")
    assert (shown.exit_code, report["unverified"]) == (0, []), shown.output


@pytest.mark.parametrize(
    ("kernels", "chosen", "property", "more"),
    [
        pytest.param(CUDA, "gradient", "cuda", "cuda", marks=pytest.mark.slow),
        pytest.param(CPP + CUDA, "layouts", "cuda", "cuda", marks=pytest.mark.slow),
        (CPP, "resources", "forward", "fake"),
    ],
    ids=["CUDA", "CUDA beside C++", "C++ that no chosen property calls"],
)
def test_a_kernel_that_the_chosen_properties_do_not_run_is_named_with_the_way_out(
    kernels: str, chosen: str, property: str, more: str, opsmith: Run, write: Write
) -> None:
    file = write(PLAIN + kernels)
    shown, report = as_chosen(opsmith, file, "--only", chosen, "--strict")
    assert shown.exit_code == 1, shown.output
    (name,) = report["unverified"]
    assert name.endswith(f" (`{property}` runs it, but is skipped: left out on request)")
    (failure,) = [each for outcome in report["outcomes"] for each in outcome["failures"]]
    assert failure["message"].endswith(f"; check `{property}`, too")
    for each in {property, more}:
        shown, report = as_chosen(opsmith, file, "--only", f"{chosen},{each}", "--strict")
        assert (shown.exit_code, report["unverified"]) == (0, []), shown.output


def test_a_kernel_that_does_not_compile_fails_a_check_whatever_is_chosen(opsmith: Run, write: Write) -> None:
    file = write(PLAIN + WRONG_CPP.replace("''')", "''', dtypes=[torch.int32])"))
    shown, report = as_chosen(opsmith, file, "--only", "layouts")
    assert shown.exit_code == 1, shown.output
    refused_at(report, "forward", file, "y(i) = T(2) * z(i)", "the C++ compiler refuses the kernel")


INTERPRETED = pytest.mark.skipif(
    interpreter.missing_interpreter() is not None, reason=str(interpreter.missing_interpreter())
)


@pytest.mark.parametrize(
    "kernels", [CPP, CUDA, pytest.param(TRITON, marks=INTERPRETED)], ids=["C++", "CUDA", "Triton"]
)
def test_a_kernel_that_ran_passes_a_strict_check(kernels: str, opsmith: Run, write: Write) -> None:
    shown, report = checked(opsmith, write(PLAIN + kernels), "--strict")
    assert shown.exit_code == 0, shown.output
    assert report["unverified"] == []


@pytest.mark.parametrize(
    ("kernels", "property", "line", "says"),
    [
        (WRONG_CPP, "forward", "y(i) = T(2) * z(i)", "the C++ compiler refuses the kernel"),
        pytest.param(
            WRONG_CPP.replace("''')", "''', dtypes=[torch.int32])"),
            "forward",
            "y(i) = T(2) * z(i)",
            "the C++ compiler refuses the kernel",
            marks=pytest.mark.slow,
        ),
        (WRONG_CUDA, "cuda", "OPSMITH_EACH", "NVRTC refuses the kernel"),
    ],
    ids=["C++", "C++ that no sample needs", "CUDA"],
)
def test_a_kernel_that_does_not_compile_fails_every_check(
    kernels: str, property: str, line: str, says: str, opsmith: Run, write: Write
) -> None:
    file = write(PLAIN + kernels)
    for options in ((), ("--strict",)):
        shown, report = checked(opsmith, file, *options)
        assert shown.exit_code == 1, shown.output
        refused_at(report, property, file, line, says)


def test_without_nvrtc_a_cuda_kernel_that_does_not_compile_fails_every_check(
    no_nvrtc: None, opsmith: Run, write: Write
) -> None:
    file = write(PLAIN + WRONG_CUDA)
    for options in ((), ("--strict",)):
        shown, report = checked(opsmith, file, *options)
        assert shown.exit_code == 1, shown.output
        refused_at(report, "cuda", file, "OPSMITH_EACH", "the C++ compiler refuses the kernel")


def refused_at(report: dict[str, Any], property: str, file: Path, line: str, says: str) -> None:
    """The error of a compiler is that of one property, with file and line."""
    number = 1 + next(at for at, text in enumerate(file.read_text().splitlines()) if line in text)
    every = [each for outcome in report["outcomes"] for each in outcome["failures"]]
    (failure,) = [each for each in every if each["follows"] is None]
    assert (failure["property"], failure["severity"]) == (property, "error")
    assert says in failure["message"]
    assert f"{file}:{number}:" in failure["message"]
    assert report["errors"] == 1


def test_of_kernels_for_several_dtypes_the_one_that_does_not_compile_is_an_error(
    opsmith: Run, write: Write
) -> None:
    """Also where it is for a dtype of low precision alone, in which a wrong result is a warning."""
    halves = WRONG_CPP.replace("gated(View", "half(View").replace(
        "''')", "''', entry='half', dtypes=[torch.bfloat16])"
    )
    shown, report = checked(opsmith, write(PLAIN + CPP + halves))
    assert shown.exit_code == 1, shown.output
    assert report["errors"] == 1
    assert "z" in shown.stdout


def test_several_files_are_checked_in_one_run(opsmith: Run, write: Write, space: str) -> None:
    first = write(PLAIN, name="first.py")
    second = write(PLAIN.replace("gated", "other"), name="second.py")
    broken = write("def (", name="broken.py")
    options = ["--quick", "--only", "forward"]
    done = opsmith("check", str(first), str(second), str(first), "--json", *options)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["schema"] == 4
    assert [each["operator"] for each in document["reports"]] == [f"{space}::gated", f"{space}::other"]
    done = opsmith("check", str(first), str(broken), str(second), *options)
    assert done.exit_code == 2
    assert done.stdout.splitlines()[-1] == "3 operators: 2 passed, 0 not passed, 1 could not be checked"
    assert f"`{broken}` cannot be imported: SyntaxError" in done.stderr
    (entry,) = json.loads(opsmith("check", str(first), str(broken), "--json", *options).stdout)["unchecked"]
    assert entry["file"] == str(broken)
    assert entry["operator"] is None
    assert f"`{broken}` cannot be imported" in entry["message"]
    wrong = write(PLAIN.replace("gated", "wrong") + IN_PYTHON.replace("gated", "wrong"), name="wrong.py")
    assert opsmith("check", str(first), str(wrong), "--strict", *options).exit_code == 1
    refused = opsmith("check", str(first), str(second), "--samples", "SAMPLES")
    assert refused.exit_code == 2
    assert "`--samples` is for one operator, but 2 files or modules are named" in refused.stderr
