"""`check` runs kernels in CUDA C++ on the CPU, beside the reference, and finds what is wrong with them."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.build.cache import Cache
from opsmith.kernels.cuda import compiler as cuda_compiler
from opsmith.kernels.cuda.emulation import compiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are emulated on Linux")

SUMS = """
template <class T>
__global__ void KERNEL(View<const T, 2> x, Contiguous<T, 1> y) {
  __shared__ float sums[32];
  const int row = blockIdx.x;
  float sum = 0;
  for (int j = threadIdx.x; j < x.size(1); j += 32) sum += float(x(row, j));
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int at = 1; at < 32; at++) sum += sums[at];
    y[row] = T(sum);
  }
}
"""


def row_sums(name: str, before: str = "", after: str = "", **launch: Any) -> Any:
    @opsmith.operator(f"cuda_property::{name}")
    def sums(x: Tensor) -> Tensor:
        return x.sum(1)

    sums.samples(lambda make: [(make(3, 5),)])
    assert before in SUMS
    text = SUMS.replace(before, after) if before else SUMS
    given = {
        "grid": "x.shape[0]",
        "block": 32,
        "dtypes": [torch.float32, torch.float16, torch.bfloat16],
        **launch,
    }
    return sums.kernel("cuda", cuda=text.replace("KERNEL", name), entry=name, **given)


def outcome_of(operator: Any, **words: Any) -> Any:
    report = opsmith.check(operator, only=["cuda"], **{"effort": "quick", **words})
    return next(each for each in report.outcomes if each.property == "cuda")


def test_a_right_kernel_passes_and_is_verified() -> None:
    operator = row_sums("right")
    report = opsmith.check(operator, only=["cuda"], effort="quick")
    (outcome,) = [each for each in report.outcomes if each.property == "cuda"]
    assert outcome.status == "passed", str(report)
    (note,) = outcome.notes
    assert note.startswith("run on the CPU, not on a GPU: ")
    assert note.endswith(" calls in float32, bfloat16, float16")
    assert report.unverified == ()


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("name", "before", "after", "cause", "input"),
    [
        ("racing", "__syncthreads();", "", "race", None),
        ("outside", "j < x.size(1)", "j <= x.size(1)", "out-of-bounds", "x"),
        (
            "unwritten",
            "sums[threadIdx.x] = sum;",
            "if (sum != 0) sums[threadIdx.x] = sum;",
            "uninitialized",
            None,
        ),
        ("strided", "x(row, j)", "x.data[row * x.size(1) + j]", "out-of-bounds", "x"),
        (
            "writing",
            "y[row] = T(sum);",
            "y[row] = T(sum), const_cast<T&>(x(0, 0)) = 0;",
            "mutates-input",
            "x",
        ),
        ("diverging", "__syncthreads();", "if (sum) __syncthreads();", "divergent-barrier", None),
        ("wrong", "at = 1;", "at = 2;", "kernel-mismatch", "result"),
    ],
    ids=lambda given: given if isinstance(given, str) and given.isalpha() else "",
)
def test_a_fault_fails_with_its_cause(
    name: str, before: str, after: str, cause: str, input: str | None
) -> None:
    outcome = outcome_of(row_sums(name, before, after))
    assert outcome.status == "failed"
    assert (cause, input) in {(each.cause, each.input) for each in outcome.failures}, outcome.failures
    for failure in outcome.failures:
        assert failure.where.startswith(f"<cuda of cuda_property::{name}>:")
        assert "sample" in failure.evidence


@pytest.mark.slow
def test_a_race_has_both_lines_in_its_evidence() -> None:
    (failure,) = outcome_of(row_sums("both_lines", "__syncthreads();", "")).failures
    assert failure.evidence["line"] == "sums[threadIdx.x] = sum;"
    assert failure.evidence["other line"].endswith(": for (int at = 1; at < 32; at++) sum += sums[at];")
    assert failure.evidence["order of threads"] == "forward"
    assert "; thread (0, 0, 0) of the same block reads the same memory" in failure.message


@pytest.mark.slow
def test_an_operator_in_place_writes_what_its_reference_writes() -> None:
    def declare(name: str, factor: int) -> Any:
        @opsmith.operator(f"cuda_property::{name}", mutates=("x",))
        def scale_(x: Tensor, y: Tensor) -> None:
            x.mul_(2).add_(y)

        scale_.samples(lambda make: [(make(3, 4), make(3, 4))])
        text = f"""
template <class T>
__global__ void {name}(View<T, 2> x, View<const T, 2> y) {{
  OPSMITH_EACH(at, x.numel()) {{
    T& each = x(at / x.size(1), at % x.size(1));
    each = each * {factor} + y(at / x.size(1), at % x.size(1));
  }}
}}
"""
        return scale_.kernel("cuda", cuda=text, entry=name, grid=2, block=4)

    assert outcome_of(declare("scale_", 2)).status == "passed"
    (failure,) = outcome_of(declare("misscale_", 3)).failures
    assert (failure.cause, failure.input) == ("kernel-mismatch", "result_x")


@pytest.mark.slow
def test_what_cannot_be_run_is_skipped_and_unverified() -> None:
    operator = row_sums("in_ptx", "__syncthreads();", 'asm volatile("bar.sync 0;");')
    report = opsmith.check(operator, only=["cuda"], effort="quick")
    (outcome,) = [each for each in report.outcomes if each.property == "cuda"]
    assert outcome.status == "skipped"
    assert outcome.reason.startswith(
        "the CUDA kernel cannot be run on the CPU: <cuda of cuda_property::in_ptx>:9:3: "
    )
    assert "#ifdef __CUDA_ARCH__" in outcome.reason
    if not torch.cuda.is_available():
        assert report.unverified == (
            "CUDA kernel at <cuda of cuda_property::in_ptx>:3 (the CUDA kernel cannot be run on the CPU: "
            "<cuda of cuda_property::in_ptx>:9:3: inline PTX is not emulated)",
        )
        (failure,) = outcome.failures
        assert (failure.cause, failure.severity) == ("not-exercised", "limit")


def barrier(name: str, before: str, **launch: Any) -> Any:
    """An operator whose kernel has a barrier of all blocks."""

    @opsmith.operator(f"cuda_property::{name}")
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    text = f"""
__device__ int arrived;
template <class T>
__global__ void {name}(Contiguous<const T> x, Contiguous<T> y) {{
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * T(2);
  {before}
  atomicAdd(&arrived, 1);
  while (atomicAdd(&arrived, 0) < gridDim.x * blockDim.x) {{}}
}}
"""
    return doubled.kernel("cuda", cuda=text, entry=name, block=32, dtypes=[torch.float32], **launch)


@pytest.mark.slow
def test_a_kernel_that_waits_for_all_blocks_is_skipped_and_unverified() -> None:
    operator = barrier("together", "", grid=2)
    operator.samples(lambda make: [(make(40),)])
    report = opsmith.check(operator, only=["cuda"], effort="quick")
    (outcome,) = [each for each in report.outcomes if each.property == "cuda"]
    assert outcome.status == "skipped", str(report)
    assert re.match(r"\d+ calls? given up: thread .* waits for another block", outcome.reason), outcome.reason
    assert re.search(r"; \d+ calls behind not run$", outcome.reason), outcome.reason
    assert outcome.notes == ()
    if not torch.cuda.is_available():
        (name,) = report.unverified
        assert name.startswith("CUDA kernel at <cuda of cuda_property::together>:4 (")
        assert "given up: thread" in name


@pytest.mark.slow
def test_a_kernel_whose_calls_are_given_up_in_part_is_skipped() -> None:
    operator = barrier("sometimes", "if (gridDim.x == 1) return;", grid="ceil(x.numel / 33)")
    operator.samples(lambda make: [(make(3),), (make(40),)])
    outcome = outcome_of(operator)
    assert outcome.status == "skipped", outcome
    assert "waits for another block" in outcome.reason
    (note,) = outcome.notes
    assert re.fullmatch(r"run on the CPU, not on a GPU: [1-9]\d* calls in float32", note)


def test_a_kernel_that_only_runs_on_nothing_is_not_exercised() -> None:
    operator = row_sums("nothing", dtypes=[torch.float32])
    operator.samples(lambda make: [(make(0, 5),)])
    outcome = outcome_of(operator)
    (failure,) = outcome.failures
    assert failure.cause == "not-exercised"
    assert "without a launch); add a sample that it takes" in failure.message


@pytest.mark.slow
def test_calls_with_too_many_threads_are_counted() -> None:
    operator = row_sums("large", dtypes=[torch.float32])
    operator.samples(lambda make: [(make(8000, 1),)])
    outcome = outcome_of(operator)
    noted = [*outcome.notes, outcome.reason]
    assert any(re.fullmatch(r"\d+ calls? not run: too many threads for a check", each) for each in noted)


@pytest.mark.slow
def test_what_clang_does_not_see_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "is_clang", lambda toolchain: True)
    outcome = outcome_of(row_sums("cast", "x(row, j)", "*(const T*)&x(row, j)"))
    assert outcome.status == "skipped"
    assert outcome.reason.startswith("clang does not show whether a whole struct")


def test_without_a_compiler_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    outcome = outcome_of(row_sums("uncompiled"))
    assert outcome.status == "skipped"
    assert outcome.reason.startswith("there is no C++ compiler")


def test_without_space_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    full = errors.CacheError(
        "a kernel cannot be built, because no temporary file can be written", got="No space left on device"
    )

    def obtain(*given: Any) -> Any:
        raise full

    monkeypatch.setattr(compiler, "obtain_with_headers", obtain)
    outcome = outcome_of(row_sums("unspaced"))
    assert outcome.status == "skipped"
    assert "no temporary file can be written: No space left on device" in outcome.reason


@pytest.mark.slow
def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The disk is a file system of 64 KiB, where this user may mount one."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        small = Cache(tmp_path / "cache")
        monkeypatch.setattr(compiler, "cache_on_disk", lambda: small)
        monkeypatch.setattr(cuda_compiler, "cache_on_disk", lambda: small)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", None)
        outcome = outcome_of(row_sums("full"))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    assert outcome.status == "skipped"
    assert "No space left on device" in outcome.reason


@pytest.mark.slow
def test_what_only_the_gpu_s_compiler_takes_is_skipped_with_its_line() -> None:
    operator = row_sums("of_a_gpu", "float sum = 0;", "float sum = __vabsdiffu4(0, 0);")
    report = opsmith.check(operator, only=["cuda"], effort="quick")
    (outcome,) = [each for each in report.outcomes if each.property == "cuda"]
    assert outcome.status == "skipped"
    assert ":6:15: there are no arguments to '__vabsdiffu4'" in outcome.reason
    assert not report.errors
    assert any("cuda" in each for each in report.unverified)


@pytest.mark.slow
def test_a_kernel_with_other_parameters_fails() -> None:
    (failure,) = outcome_of(row_sums("misfit", "Contiguous<T, 1> y", "int n, Contiguous<T, 1> y")).failures
    assert failure.cause == "raises"
    assert "the parameters of the CUDA kernel are not the operator's arguments and results" in failure.message


def test_a_kernel_that_takes_no_sample_is_not_exercised() -> None:
    operator = row_sums("idle", dtypes=[torch.int32])
    (failure,) = outcome_of(operator).failures
    assert failure.cause == "not-exercised"


def test_an_operator_without_such_a_kernel_is_skipped() -> None:
    @opsmith.operator("cuda_property::plain")
    def plain(x: Tensor) -> Tensor:
        return x * 2

    plain.samples(lambda make: [(make(2),)])
    outcome = outcome_of(plain)
    assert (outcome.status, outcome.reason) == ("skipped", "the operator has no kernel in CUDA C++")
