"""Emulation of CUDA kernels by other compilers: each finds in a kernel what the others find."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from emulated_kernels import KernelCase
from kernel_corpus import CASES
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.emulation import unseen
from opsmith.kernels.cuda.emulation.refusals import refused
from opsmith.kernels.cuda.source import CudaSource

COMPILERS = ("g++-11", "clang++")
RIGHT = ("fours", "structs", "locked", "histogram", "warp_sum")
WRONG = (
    *("no_first_barrier", "null_pointer", "negative_index", "barrier_for_some", "sum_not_started", "no_lock"),
    *("maximum_by_hand", "never_zero", "wrong_cast", "sums_into_input", "one_result_too_many"),
)
WHOLE_STRUCTS = ("odd_start", "odd_rows")
"""Kernels that copy a `float4` at a misaligned address."""


@pytest.fixture(params=COMPILERS)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("CXX", name)
    return name


def cause_of(case: KernelCase) -> str:
    """Cause of the fault that is found; empty if the results are those of the reference."""
    try:
        got = opsmith.emulate(case.operator(), *case.arguments)
    except errors.KernelFaultError as error:
        return error.problem.removeprefix("the CUDA kernel is faulty: ")
    torch.testing.assert_close(got, case.reference(*case.arguments))
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_each_compiler_finds_the_same(name: str, compiler: str) -> None:
    assert cause_of(CASES[name]) == CASES[name].cause


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE_STRUCTS)
def test_a_misaligned_struct_is_found_or_said_to_be_unseen(name: str, compiler: str) -> None:
    case = CASES[name]
    if unseen.unseen_faults(source_of(case.text)) is None:
        with pytest.raises(errors.KernelFaultError, match="misaligned"):
            opsmith.emulate(case.operator(), *case.arguments)
    else:
        assert compiler == "clang++"


@pytest.mark.slow
def test_a_copied_struct_is_checked(compiler: str) -> None:
    text = """
struct Pair { int first, second, third; };
__global__ void copied(Contiguous<const float> x, Contiguous<float> y) {
  const Pair* from = (const Pair*)x.data;
  Pair* to = (Pair*)y.data;
  to[threadIdx.x] = from[threadIdx.x + 1];
}
"""

    @opsmith.operator("emulation_compilers::copied")
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    copied.kernel("cuda", cuda=text, grid=1, block=4)
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(copied, torch.ones(12))
    assert caught.value.problem == "the CUDA kernel is faulty: out-of-bounds"
    assert "reads 12 bytes of memory after `x` [12]" in (caught.value.got or "")


def source_of(text: str) -> CudaSource:
    return CudaSource(text, "kernel", False, "a.cu", 1, 1)


@pytest.mark.parametrize(
    ("text", "casts"),
    [
        ("float4 v = *reinterpret_cast<const float4*>(x + 1);", True),
        ("float4 v = *(const float4 *)(x + 1);", True),
        ("((Pack<float, 4>*)x)[i] = v;", True),
        ("auto p = static_cast<unsigned*>(x);", True),
        ("y[i] = float(a) * (b * c) + (d*e);", False),
        ("void f(float*) {}", False),
    ],
)
def test_clang_does_not_see_misaligned_structs_behind_a_cast(
    text: str, casts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(text)
    monkeypatch.setattr(unseen, "kernel_toolchain", lambda: SimpleNamespace(identity="g++ (Debian) 12"))
    assert unseen.unseen_faults(source) is None
    monkeypatch.setattr(unseen, "kernel_toolchain", lambda: SimpleNamespace(identity="clang version 14"))
    expected = (
        "clang does not show whether a whole struct, such as a `float4`, is copied at a misaligned address: "
        "name g++ in CXX"
    )
    assert unseen.unseen_faults(source) == (expected if casts else None)


@pytest.mark.parametrize(
    ("printed", "got"),
    [
        (
            "a.cu:1:7: error: 'operator new[]' is unavailable: the heap of a GPU is not emulated",
            "a.cu:1:7: the heap of a GPU is not emulated",
        ),
        (
            "unsupported/mma.h:1:2: error: the matrix units are not emulated",
            "a.cu:1: the matrix units are not emulated",
        ),
        (
            "unsupported/mma.h:1:2: error: #error the matrix units are not emulated",
            "a.cu:1: the matrix units are not emulated",
        ),
    ],
    ids=["new", "clang", "g++"],
)
def test_what_a_compiler_refuses_has_the_same_words(printed: str, got: str) -> None:
    error = refused(printed, source_of("#include <mma.h>"), "demo::refused")
    assert (error.got or "").splitlines()[0] == got
