"""Messages about CUDA kernels on the CPU: what is wrong, where, and what cannot be run there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_corpus import CASES
from torch import Tensor

import opsmith
from opsmith import errors


def message(name: str) -> list[str]:
    """The message about a faulty kernel, without the operator's name and paths."""
    case = CASES[name]
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(case.operator(), *case.arguments)
    text = str(caught.value).replace(f"emulated_kernels::{name}: ", "")
    text = text.replace(f"<cuda of emulated_kernels::{name}>", "a.cu")
    return text.replace("thread (0, 0, 0) of block (0, 0, 0)", "the first thread").splitlines()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "no_first_barrier",
            [
                "the CUDA kernel is faulty: race",
                "  got: thread (16, 0, 0) of block (0, 0, 0) writes 4 bytes of shared memory "
                "at byte 64, which "
                "thread (0, 0, 0) of the same block reads at a.cu:11, and nothing orders the two accesses",
                "    a.cu:8: partial[threadIdx.x] = sum;  // own",
                "    a.cu:11: if (threadIdx.x < half) partial[threadIdx.x] += "
                "partial[threadIdx.x + half];  // fold",
                "  where: a.cu:8",
                "  hint: put `__syncthreads()` between the two, or `__syncwarp()` where all "
                "threads are of one warp",
            ],
        ),
        (
            "two_blocks_one_element",
            [
                "  argument: result",
                "  hint: blocks run in any order: let one block alone write an element, or use atomics",
            ],
        ),
        (
            "no_bounds",
            [
                "the CUDA kernel is faulty: out-of-bounds",
                "  argument: x",
                "  got: thread (6, 0, 0) of block (2, 0, 0) reads 4 bytes of memory behind `x` "
                "[70]: just behind "
                "its last element",
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
                "  got: the first thread writes 4 bytes of dynamic shared memory at byte 0, and "
                "a block has 0",
                "  hint: give the launch more by `shared=`",
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
                "  got: the first thread reads 4 bytes of memory behind `x` [5, 6]: 12 elements "
                "further than its end",
            ],
        ),
        (
            "recursion",
            ["  got: the first thread needs more of the stack than there is: 192 KiB here"],
        ),
        (
            "remainder_forgotten",
            [
                "the CUDA kernel is faulty: out-of-bounds",
                "  got: thread (2, 0, 0) of block (0, 0, 0) writes 4 bytes of shared memory 28 bytes "
                "behind the end of `s_bins`, which has 256 bytes",
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
                "or name it in `initial=`",
            ],
        ),
        (
            "grid_too_small",
            [
                "  got: it does not write 6 of 70 elements of `result` [70], the first at [64]",
                "  hint: let the grid cover all elements, and write each",
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
                "  got: thread (8, 0, 0) of block (0, 0, 0) waits at this barrier, and thread "
                "(0, 0, 0) of the same "
                "block at a.cu:8",
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
                "  got: thread (16, 0, 0) of block (0, 0, 0) is lane 16, which its own mask "
                "does not name (and 2 "
                "more)",
                "  hint: name in the mask each lane that takes part",
            ],
        ),
        (
            "slice_as_fours",
            [
                "the CUDA kernel is faulty: misaligned",
                "  argument: x",
                "  got: the first thread uses `x` [64] at element [0] as `const float4`, which "
                "must lie at a multiple of 16 bytes",
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
                "  got: the first thread writes 4 bytes of `x` [70] at element [0], which is an input",
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
    "put what a GPU alone has between `#ifdef __CUDA_ARCH__` and `#else`, and behind that "
    "plain C++ that does "
    "the same"
)


@pytest.mark.every(2)
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
    with pytest.raises(errors.NotEmulatedError) as caught:
        opsmith.emulate(declared("semicolon", LINES.replace("BEFORE", "int n = 1")), torch.ones(4))
    assert caught.value.hint == "correct the first of these errors; those after it may follow from it"


def test_a_line_that_all_threads_write_by_needs_one_thread_and_no_barrier() -> None:
    text = "__global__ void KERNEL(Contiguous<const float> x, Contiguous<float> y) { y[0] = threadIdx.x; }"
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(declared("all_write", text), torch.ones(1))
    assert (
        caught.value.hint == "let one thread write the element, as by `if (threadIdx.x == 0)`, or use atomics"
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
