"""CUDA C++ of emulated kernels: a compiler of the CPU takes and refuses what NVRTC does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.build.cache import Cache
from opsmith.kernels.cpp import compiler as cpp_compiler
from opsmith.kernels.cpp import diagnostics
from opsmith.kernels.cuda import compiler as compiling
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.emulation import compiler, refusals
from opsmith.kernels.cuda.source import cuda_source

KERNEL = """
__global__ void KERNEL(Contiguous<const float> x, Contiguous<float> y) {
LINES
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * 2;
}
"""
FIRST_LINE = 3
DECLARED = (
    "__shared__ float f; __shared__ double d; __shared__ int i; __shared__ unsigned u; __shared__ short s; "
    "__shared__ unsigned short us; __shared__ int64_t l; __shared__ uint64_t ul; struct Pair { int a, b; }; "
    "Pair pair{1, 2}; __shared__ unsigned char c; int all; volatile __shared__ int vi;"
)
ZERO = (
    "if (threadIdx.x == 0) f = 0, d = 0, i = 0, u = 0, s = 0, us = 0, l = 0, ul = 0, c = 0; __syncthreads();"
)
TAKEN = [
    DECLARED,
    ZERO,
    "atomicAdd(&f, 1); atomicAdd(&d, 1.f); atomicAdd(&i, 1u); atomicAdd(&u, 1); atomicAdd(&ul, 1);",
    "atomicAdd((unsigned long long*)&l, (unsigned long long)-1); atomicSub(&i, 1); atomicSub(&u, 1);",
    "atomicExch(&f, 1.0); atomicExch(&i, 1); atomicExch(&ul, 1);",
    "atomicMax(&i, 3.7f); atomicMin(&u, 3); atomicMax(&l, 3); atomicMin_block(&l, -3); atomicMax(&ul, 3);",
    "atomicAnd(&i, 1); atomicOr_block(&u, 1); atomicXor_system(&ul, 1); atomicOr(&l, 1ll);",
    "atomicInc(&u, 3); atomicDec(&u, 3);",
    "atomicCAS(&i, 0, 1); atomicCAS(&u, 0, 1); atomicCAS(&ul, 0, 1); atomicCAS(&us, 0, 1);",
    "float f1 = __shfl_sync(~0u, 1.5f, 0); double d1 = __shfl_up_sync(~0u, 1.5, 1);",
    "int i1 = __shfl_down_sync(~0u, short(1), 1) + __shfl_sync(~0u, (unsigned char)1, 0);",
    "int64_t l1 = __shfl_xor_sync(~0u, int64_t(1), 1); uint64_t u1 = __shfl_sync(~0u, uint64_t(1), 0);",
    "float h1 = __shfl_sync(~0u, opsmith::Half(1.5f), 0); unsigned m1 = __match_any_sync(~0u, 1.5);",
    "m1 = __match_all_sync(~0u, int64_t(threadIdx.x), &all);",
    "assert(f1 == 1.5f && d1 == 1.5 && i1 == 2 && l1 == 1 && u1 == 1 && h1 == 1.5f && m1 == 0);",
]
REFUSED = [
    "atomicMax(&f, 1.0f);",
    "atomicMin(&d, 1.0);",
    "atomicSub(&f, 1.0f);",
    "atomicSub(&ul, 1ull);",
    "atomicAdd(&l, int64_t(1));",
    "atomicAdd(&s, short(1));",
    "atomicAdd(&c, 1);",
    "atomicAdd(&vi, 1);",
    "atomicInc(&i, 1);",
    "atomicExch(&d, 1.0);",
    "atomicCAS(&f, 0.0f, 1.0f);",
    "atomicCAS(&s, short(0), short(1));",
    "pair = __shfl_sync(~0u, pair, 0);",
    "__match_any_sync(~0u, pair);",
]


def declared(name: str, lines: list[str], **launch: Any) -> Any:
    def double(x: Tensor) -> Tensor:
        return x * 2

    operator = opsmith.operator(f"emulated_language::{name}")(double)
    return operator.kernel("cuda", cuda=text_of(name, lines), entry=name, grid=1, block=32, **launch)


def text_of(name: str, lines: list[str]) -> str:
    return KERNEL.replace("LINES", "\n".join(lines)).replace("KERNEL", name)


def compiled(name: str, lines: list[str]) -> None:
    source = cuda_source(
        f"emulated_language::{name}", cuda=text_of(name, lines), cuda_file=None, entries=[None], declared=None
    )
    compiling.compile_instance(source, f"emulated_language::{name}", Instance(), "sm_80")


def refused_lines(error: errors.OpsmithError) -> set[int]:
    """Lines that a compiler refuses, by their number among those of the kernel."""
    return {int(number) - FIRST_LINE for number in re.findall(r">:(\d+):", error.got or "")}


def test_atomics_and_shuffles_that_nvrtc_takes_are_taken() -> None:
    compiled("taken", TAKEN)
    assert opsmith.emulate(declared("taken", TAKEN), torch.ones(4)).tolist() == [2.0] * 4


def test_atomics_and_shuffles_that_nvrtc_refuses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "MAX_ERRORS", 100)
    monkeypatch.setattr(refusals, "by_nvrtc", lambda *given: None)  # the emulation itself refuses them
    lines = [DECLARED, *REFUSED]
    with pytest.raises(errors.CompileError) as by_nvrtc:
        compiled("refused", lines)
    with pytest.raises(errors.NotEmulatedError) as by_cpu:
        opsmith.emulate(declared("refused", lines), torch.ones(4))
    every = set(range(1, len(lines)))
    assert refused_lines(by_nvrtc.value) == every
    assert refused_lines(by_cpu.value) == every


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("created", "  float* p = new float(x[0]); y[0] = *p; delete p;"),
        pytest.param(
            "created_many", "  float* p = new float[2]; p[0] = x[0]; y[0] = p[0];", marks=pytest.mark.slow
        ),
        pytest.param(
            "allocated", "  int* p = (int*)malloc(4); *p = 1; y[0] = *p; free(p);", marks=pytest.mark.slow
        ),
    ],
)
def test_the_heap_is_not_emulated(name: str, line: str) -> None:
    with pytest.raises(errors.NotEmulatedError) as caught:
        opsmith.emulate(declared(name, [line]), torch.ones(4))
    first = (caught.value.got or "").splitlines()[0]
    assert re.fullmatch(
        rf"<cuda of emulated_language::{name}>:3:\d+: the heap of a GPU is not emulated", first
    )


@pytest.mark.parametrize("header", ["", pytest.param("#include <cassert>", marks=pytest.mark.slow)])
def test_an_assertion_is_named_as_it_is_written(header: str) -> None:
    name = f"asserted_{len(header)}"
    operator = declared(name, ["#include <assert.h>", "assert(x[threadIdx.x % 4] > 2);"])
    with pytest.raises(errors.KernelFaultError, match=re.escape("stopped by assert(x[threadIdx.x % 4] > 2)")):
        opsmith.emulate(operator, torch.ones(4))


@pytest.mark.slow
def test_a_sleep_that_waits_in_vain_is_named_with_its_line() -> None:
    lines = [
        "__shared__ int stop; if (threadIdx.x == 0) stop = 0;",
        "__syncthreads();",
        "while (*(volatile int*)&stop == 0)",
        "  __nanosleep(10);",
    ]
    with pytest.raises(errors.KernelFaultError) as caught:
        opsmith.emulate(declared("asleep", lines), torch.ones(4))
    assert caught.value.problem == "the CUDA kernel is faulty: endless"
    assert re.search(r">:[56]$", caught.value.where or "")


def test_a_local_variable_without_a_value_shows() -> None:
    lines = [
        "float sum, parts[4];",
        "for (int j = 0; j < 3; j++) sum += x[j], parts[j] += x[j];",
        "y[0] = sum + parts[threadIdx.x % 3];",
    ]
    text = text_of("unset", lines).replace("y[0] =", "if (threadIdx.x < 4) y[threadIdx.x] =")
    text = text.replace("  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * 2;\n", "")

    def double(x: Tensor) -> Tensor:
        return x * 2

    operator = opsmith.operator("emulated_language::unset")(double)
    got = opsmith.emulate(operator.kernel("cuda", cuda=text, entry="unset", grid=1, block=32), torch.ones(4))
    if not compiler._fills_locals(cpp_compiler.kernel_toolchain()):
        pytest.skip("the compiler cannot fill local variables")
    assert bool(((got < -1e30) | got.isnan()).all())  # g++ and clang


@pytest.mark.slow
def test_every_part_of_a_library_counts_and_it_alone_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Cache(tmp_path / "cache")
    monkeypatch.setattr(compiling, "cache_on_disk", lambda: disk)
    operator = declared("kept", [])
    opsmith.emulate(operator, torch.ones(4))
    (entry,) = disk.entries()
    assert {path.name for path in entry.iterdir()} == {compiler.LIBRARY, "manifest.json"}
    parts = json.loads((entry / "manifest.json").read_text())["parts"]
    for name, value in (
        ("_STUB", compiler._STUB + "\n"),
        ("MAX_SHARED", 64 * 1024),
        ("_LINK_FLAGS", ("-shared",)),
    ):
        monkeypatch.setattr(compiler, name, value)
        with pytest.raises(_AnotherKeyError):
            _other_parts(operator, parts, monkeypatch)


class _AnotherKeyError(Exception):
    """A library would be built again."""


def _other_parts(operator: Any, parts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_up(found: dict[str, str], *_: Any) -> Any:
        if found != parts:
            raise _AnotherKeyError
        pytest.fail("found under the same key")

    monkeypatch.setattr(compiler, "obtain_with_headers", looked_up)
    opsmith.emulate(operator, torch.ones(4))
