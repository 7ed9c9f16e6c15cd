"""Messages about CUDA kernels on the CPU: what is wrong, where, and what cannot be run there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_corpus import CASES
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.emulation import refusals
from opsmith.kernels.cuda.emulation.refusals import refused
from opsmith.kernels.cuda.source import CudaSource


def message(name: str) -> list[str]:
    """The message about a faulty kernel, without the operator's name and paths."""
    case = CASES[name]
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(case.operator(), *case.arguments)
    text = str(caught.value).replace(f"emulated_kernels::{name}: ", "")
    text = text.replace(f"<cuda of emulated_kernels::{name}>", "a.cu")
    return text.replace("thread (0, 0, 0) of block (0, 0, 0)", "the first thread").splitlines()


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "no_first_barrier",
            [
                "the CUDA kernel is faulty: race",
                "  got: thread (16, 0, 0) of block (0, 0, 0) writes 4 bytes of shared memory "
                "at byte 64; "
                "thread (0, 0, 0) of the same block reads the same memory at a.cu:11, and nothing orders "
                "the two accesses",
                "    a.cu:8: partial[threadIdx.x] = sum;  // own",
                "    a.cu:11: if (threadIdx.x < half) partial[threadIdx.x] += "
                "partial[threadIdx.x + half];  // fold",
                "  where: a.cu:8",
                "  hint: put `__syncthreads()` between the two accesses, or `__syncwarp()` if all "
                "threads are in one warp",
            ],
        ),
        (
            "two_blocks_one_element",
            [
                "  argument: result",
                "  hint: blocks run in any order: let only one block write an element, or use atomics",
            ],
        ),
        (
            "no_bounds",
            [
                "the CUDA kernel is faulty: out-of-bounds",
                "  argument: x",
                "  got: thread (6, 0, 0) of block (2, 0, 0) reads 4 bytes of memory after `x` "
                "[70]: just after its last element",
                "    a.cu:5: y[i] = x[i] + other[i];  // element",
                "  hint: compare the index with the size before the access",
            ],
        ),
        (
            "negative_index",
            [
                "  got: the first thread reads 4 bytes of memory before `x` [70]: 1 element "
                "before its first element",
            ],
        ),
        (
            "no_shared",
            [
                "  got: the first thread writes 4 bytes of dynamic shared memory at byte 0, but "
                "a block has 0 bytes",
                "  hint: give the launch more shared memory by `shared=`",
            ],
        ),
        (
            "window_too_short",
            [
                "  got: the first thread takes an index beyond the end of an array (and 1 more)",
            ],
        ),
        (
            "strides_ignored",
            [
                "  got: the first thread reads 4 bytes of memory after `x` [5, 6]: 12 elements after its end",
            ],
        ),
        (
            "recursion",
            ["  got: the first thread needs more stack than the emulation has: 192 KiB"],
        ),
        (
            "remainder_forgotten",
            [
                "the CUDA kernel is faulty: out-of-bounds",
                "  got: thread (2, 0, 0) of block (0, 0, 0) writes 4 bytes of shared memory 28 bytes "
                "after the end of `s_bins`, which has 256 bytes",
                "  hint: compare the index with the size of the array, or make the array larger",
            ],
        ),
        (
            "null_pointer",
            ["  got: the first thread reads 4 bytes far from any tensor"],
        ),
        (
            "adds_to_result",
            [
                "the CUDA kernel is faulty: uninitialized",
                "  argument: result",
                "  got: the first thread reads 4 bytes of `result` [3] at element [0], which no "
                "thread has written",
                "  hint: memory is not zero before the launch: write each element before it is read, "
                "or name the tensor in `initial=`",
            ],
        ),
        (
            "grid_too_small",
            [
                "  got: the kernel does not write 6 of 70 elements of `result` [70]; the first is at [64]",
                "  hint: let the grid cover all elements, and write each element",
            ],
        ),
        (
            "bins_not_zeroed",
            ["  hint: write shared memory before it is read, in each block"],
        ),
        (
            "two_barriers",
            [
                "the CUDA kernel is faulty: divergent-barrier",
                "  got: thread (8, 0, 0) of block (0, 0, 0) waits at this barrier, but thread "
                "(0, 0, 0) of the same "
                "block waits at a.cu:8",
                "    a.cu:9: else __syncthreads();",
                "    a.cu:8: if (threadIdx.x < 8) __syncthreads();",
            ],
        ),
        (
            "uneven_trips",
            [
                "  hint: let all threads of a block reach each `__syncthreads()`: put it "
                "outside of conditions",
            ],
        ),
        (
            "mask_of_half_a_warp",
            [
                "  got: thread (16, 0, 0) of block (0, 0, 0) is lane 16, but its own mask "
                "does not name this lane (and 2 "
                "more)",
                "  hint: the mask must name each lane that takes part",
            ],
        ),
        (
            "slice_as_fours",
            [
                "the CUDA kernel is faulty: misaligned",
                "  argument: x",
                "  got: the first thread uses `x` [64] at element [0] as `const float4`, which "
                "must be aligned to 16 bytes",
                "    a.cu:5: float4 four = *reinterpret_cast<const float4*>(x.data + i);  // load",
            ],
        ),
        (
            "no_step",
            [
                "the CUDA kernel is faulty: endless",
                "  got: the first thread does not end: it was in this line when it was stopped",
                "    a.cu:5: if (i < y.numel()) for (int j = 0; j < 4;) y[i] = x[i] + other[i];  // element",
            ],
        ),
        (
            "writes_its_input",
            [
                "the CUDA kernel is faulty: mutates-input",
                "  got: the first thread writes 4 bytes of `x` [70] at element [0], but `x` is an input",
                "  hint: write into a result, or declare the operator to write in place",
            ],
        ),
        (
            "assertion",
            [
                "the CUDA kernel is faulty: raises",
                "  got: thread (5, 0, 0) of block (0, 0, 0) is stopped by assert(i < 5)",
            ],
        ),
        (
            "division",
            [
                "the CUDA kernel is faulty: undefined",
                "  got: the first thread: it divides a whole number by zero",
            ],
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_fault_is_named_with_its_line(name: str, lines: list[str]) -> None:
    said = message(name)
    assert [line for line in said if line in lines] == lines, "\n".join(said)


def declared(name: str, text: str, **launch: Any) -> Any:
    def double(x: Tensor) -> Tensor:
        return x * 2

    operator = opsmith.operator(f"emulation_messages::{name}")(double)
    text = text.replace("KERNEL", name)
    return operator.kernel("cuda", cuda=text, entry=name, **{"grid": 1, "block": 32, **launch})


LINES = """
__global__ void KERNEL(Contiguous<const float> x, Contiguous<float> y) {
  BEFORE
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * 2;
}
"""
PTX = 'asm volatile("bar.sync 0;");'
WAY_OUT = (
    "put code that only a GPU can run after `#ifdef __CUDA_ARCH__`, and equivalent plain C++ after `#else`"
)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("name", "text", "got"),
    [
        ("ptx", LINES.replace("BEFORE", PTX), ":3:3: inline PTX is not emulated"),
        (
            "groups",
            "#include <cooperative_groups.h>\n" + LINES.replace("BEFORE", ""),
            ":1: cooperative groups are not emulated",
        ),
        ("cub", "\n#include <cub/cub.cuh>\n" + LINES.replace("BEFORE", ""), ":2: cub is not emulated"),
        (
            "wmma",
            "#include <mma.h>\n" + LINES.replace("BEFORE", ""),
            ":1: the matrix units (`wmma`) are not emulated",
        ),
        (
            "textures",
            LINES.replace("BEFORE", "tex2D<float>(0, 0, 0);"),
            ":3:3: 'tex2D' was not declared in this scope",
        ),
    ],
    ids=["ptx", "groups", "cub", "wmma", "textures"],
)
def test_what_the_cpu_cannot_run_is_named_with_the_way_out(name: str, text: str, got: str) -> None:
    with pytest.raises(errors.NotEmulatedError) as caught:
        opsmith.emulate(declared(name, text), torch.ones(4))
    assert caught.value.problem == "the CUDA kernel cannot be run on the CPU"
    first = (caught.value.got or "").splitlines()[0]
    assert first == f"<cuda of emulation_messages::{name}>{got}"
    assert caught.value.hint == WAY_OUT


def test_a_mistake_that_any_compiler_sees_is_not_taken_for_code_of_a_gpu() -> None:
    with pytest.raises(errors.CompileError, match="NVRTC refuses the kernel") as caught:
        opsmith.emulate(declared("semicolon", LINES.replace("BEFORE", "int n = 1")), torch.ones(4))
    assert caught.value.hint == "fix the first error; the later errors may follow from it"


@pytest.mark.parametrize(
    ("name", "line", "got"),
    [
        ("semicolon", "int n = 1", ":4:3: expected ',' or ';' before 'for'"),
        ("type", "flaot n = 1;", ":3:3: 'flaot' was not declared in this scope"),
        ("builtin", "int n = treadIdx.x;", ":3:11: 'treadIdx' was not declared in this scope"),
        ("constant", "x[0] = 1;", ":3:8: assignment of read-only location"),
        (
            "way_out_too",
            "\n#ifdef __CUDA_ARCH__\n__nanosleep(1);\n#endif\n  int n = 1",
            ":8:3: expected ',' or ';' before 'for'",
        ),
    ],
    ids=["semicolon", "type", "builtin", "constant", "way out"],
)
def test_without_nvrtc_a_mistake_is_an_error_of_the_c_compiler(
    name: str, line: str, got: str, no_nvrtc: None
) -> None:
    with pytest.raises(errors.CompileError) as caught:
        opsmith.emulate(declared(f"mistake_{name}", LINES.replace("BEFORE", line)), torch.ones(4))
    assert caught.value.problem == "the C++ compiler refuses the kernel"
    assert (caught.value.got or "").startswith(f"<cuda of emulation_messages::mistake_{name}>{got}")


@pytest.mark.parametrize(
    ("name", "before", "line"),
    [
        ("intrinsic", "", "int n = __vabsdiffu4(0, 0);"),
        ("texture", "", "cudaTextureObject_t texture;"),
        ("overload", "", "atomicAdd(&y[0], 1, 2);"),
        ("header", "#include <curand_kernel.h>", ""),
        ("own_assembler", "", '__asm__ volatile("bar.sync 0;");'),
        ("refused_on_a_cpu", "#ifndef __CUDA_ARCH__\n#error for GPUs\n#endif", ""),
        ("macro", "#ifdef __CUDA_ARCH__\n#define WAIT __syncthreads();\n#endif", "WAIT"),
    ],
    ids=["intrinsic", "texture", "overload", "header", "assembler", "refused on a CPU", "macro"],
)
def test_without_nvrtc_what_a_gpu_s_compiler_may_take_is_not_called_a_mistake(
    name: str, before: str, line: str, no_nvrtc: None
) -> None:
    text = f"{before}{LINES.replace('BEFORE', line)}"
    with pytest.raises(errors.NotEmulatedError):
        opsmith.emulate(declared(f"perhaps_{name}", text), torch.ones(4))


def test_names_that_nvrtc_alone_knows_are_known(no_nvrtc: None) -> None:
    """They are of the kinds that NVRTC 13.0 has and the emulation lacks, of all names of CUDA's headers."""
    names = "CUuuid all any ballot cudaArray dadd double2int double4_16a fdivide long1 make_long1 norm "
    names += "rnormf surf2Dread syncthreads_and tex1Dfetch texCubemap ulonglong4_32a __nv_bfloat16"
    source = CudaSource("", "k", False, "a.cu", 1, 1)
    for name in names.split():
        printed = f"a.cu:1:1: error: '{name}' was not declared in this scope"
        assert isinstance(refused(printed, source, "demo::named"), errors.NotEmulatedError), name
    printed = "a.cu:1:1: error: 'cumsum' was not declared in this scope"
    assert isinstance(refused(printed, source, "demo::named"), errors.CompileError)


def test_a_header_of_nvidia_is_known_behind_a_symbolic_link(
    no_nvrtc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "installed")
    monkeypatch.setattr(refusals, "nvidia_folders", lambda source: [tmp_path / "linked"])
    source = CudaSource("", "k", False, "a.cu", 1, 1)
    for folder, error in [
        ("installed", errors.NotEmulatedError),
        ("linked", errors.NotEmulatedError),
        ("own", errors.CompileError),
    ]:
        printed = f"{tmp_path / folder}/curand.h:1:1: error: 'kind' was not declared in this scope"
        assert isinstance(refused(printed, source, "demo::linked"), error), folder


def test_a_line_that_all_threads_write_by_needs_one_thread_and_no_barrier() -> None:
    text = "__global__ void KERNEL(Contiguous<const float> x, Contiguous<float> y) { y[0] = threadIdx.x; }"
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(declared("all_write", text), torch.ones(1))
    assert (
        caught.value.hint
        == "let one thread write the element, for example by `if (threadIdx.x == 0)`, or use atomics"
    )


def test_the_way_out_is_one() -> None:
    text = LINES.replace("BEFORE", f"\n#ifdef __CUDA_ARCH__\n{PTX}\n#endif\n")
    assert opsmith.emulate(declared("way_out", text), torch.ones(4)).tolist() == [2.0] * 4


def test_what_is_no_call() -> None:
    operator = declared("called", LINES.replace("BEFORE", ""))
    with pytest.raises(errors.KernelRefusedError) as refused:
        opsmith.emulate(operator, torch.ones(4, dtype=torch.float64))
    assert "does not take the call" in refused.value.problem
    with pytest.raises(errors.UsageError) as elsewhere:
        opsmith.emulate(operator, torch.ones(4, device="meta"))
    assert elsewhere.value.got == "a tensor on meta"
    with pytest.raises(errors.UsageError) as other:
        opsmith.emulate(torch.add, torch.ones(4))  # type: ignore[arg-type]
    assert other.value.problem == "only an operator of opsmith can be emulated"
    assert other.value.got == repr(torch.add)
    with pytest.raises(errors.ArgumentError) as missing:
        opsmith.emulate(operator)
    assert missing.value.problem == "`x` is missing"
    with pytest.raises(errors.UsageError) as order:
        opsmith.emulate(operator, torch.ones(4), order="sideways")
    assert order.value.expected == "`forward`, `backward`, `alternating`, `random`, or `random(7)`"

    @opsmith.operator("emulation_messages::plain")
    def plain(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(errors.UsageError) as none:
        opsmith.emulate(plain, torch.ones(4))
    assert none.value.problem == "it has no kernel in CUDA C++ to emulate"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(errors.ToolchainError) as caught:
        opsmith.emulate(declared("uncompiled", LINES.replace("BEFORE", "")), torch.ones(4))
    assert caught.value.problem == "there is no C++ compiler"
