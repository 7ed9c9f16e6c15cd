"""From CUDA C++ to a cubin: what it takes of a GPU, what is kept, and where NVRTC is looked for."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from opsmith import errors
from opsmith.build.cache import Cache
from opsmith.core.argument_types import NUMBERED
from opsmith.kernels.common.gpu_resources import MULTIPROCESSORS, Resources, occupancy, read_resources
from opsmith.kernels.common.parameters import LAYOUTS, PARAMETER_TYPES
from opsmith.kernels.cuda import compiler as compiling
from opsmith.kernels.cuda import nvrtc
from opsmith.kernels.cuda.compiler import Instance, diagnostics, name_expression
from opsmith.kernels.cuda.parameters import VERSION
from opsmith.kernels.cuda.rules import MAX_DIM
from opsmith.kernels.cuda.source import cuda_source
from opsmith.kernels.runtime import driver

SPILLING = """
template <class T>
__global__ void __launch_bounds__(1024, 2) greedy(Contiguous<const T> x, Contiguous<T> y) {
  T kept[64];
  __shared__ T some[96];
  for (int i = 0; i < 64; i++) kept[i] = x[i * blockDim.x + threadIdx.x];
  some[threadIdx.x % 96] = kept[0];
  __syncthreads();
  for (int round = 0; round < 64; round++)
    for (int i = 0; i < 64; i++) kept[i] = kept[i] * kept[(i + 7) % 64] + some[i];
  T sum = 0;
  for (int i = 0; i < 64; i++) sum += kept[i];
  y[threadIdx.x] = sum;
}
"""

SIMPLE = """
template <class T>
__global__ void greedy(Contiguous<const T> x, Contiguous<T> y) { y[threadIdx.x] = x[threadIdx.x]; }
"""


def source_of(text: str, name: str = "greedy") -> Any:
    return cuda_source(f"cuda_build::{name}", cuda=text, cuda_file=None, entries=[None], declared=None)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    kept = Cache(tmp_path / "cache")
    monkeypatch.setattr(compiling, "cache_on_disk", lambda: kept)
    return kept


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_registers_spills_and_shared_memory_are_told(architecture: str) -> None:
    found = compiling.compile_instance(
        source_of(SPILLING), "cuda_build::greedy", Instance(torch.float64), architecture
    )
    assert found.resources.registers == 32  # as many as 2 blocks of 1024 threads leave to each
    assert found.resources.spills > 0
    assert found.resources.shared == 96 * 8
    assert found.image[:4] == b"\x7fELF"
    assert int.from_bytes(found.image[18:20], "little") == 190  # EM_CUDA
    assert found.name.startswith("_Z6greedyId")


def test_a_log_without_the_kernel_says_nothing() -> None:
    log = (
        "ptxas info    : Compiling entry function 'first' for 'sm_90'\n"
        "ptxas         .     8 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 400 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'second' for 'sm_90'\n"
        "ptxas info    : Used 8 registers\n"
    )
    assert read_resources(log, "first") == Resources(40, 16, 32, 8, 512)
    assert read_resources(log, "second") == Resources(8)
    assert read_resources(log, "third") is None


def test_it_comes_from_the_disk_and_every_part_of_the_key_counts(
    disk: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(SIMPLE)

    def build(architecture: str = "sm_80", dtype: torch.dtype = torch.float32) -> None:
        compiling.compile_instance(source, "cuda_build::greedy", Instance(dtype), architecture)

    build()
    assert len(disk.entries()) == 1
    monkeypatch.setattr(compiling, "find_nvrtc", lambda: pytest.fail("compiled again"))
    disk._known.clear()
    build()
    monkeypatch.undo()
    monkeypatch.setattr(compiling, "cache_on_disk", lambda: disk)
    build("sm_90")
    build(dtype=torch.float64)
    monkeypatch.setattr(compiling, "header", lambda: compiling.HEADER.read_text() + "// another")
    build()
    monkeypatch.setattr(compiling, "nvrtc_identity", lambda: "another")
    build()
    monkeypatch.setattr(compiling, "headers_version", lambda: "another")
    build()
    assert len(disk.entries()) == 6
    parts = json.loads((disk.entries()[0] / "manifest.json").read_text())["parts"]
    assert {"text", "options", "header", "compiler", "headers", "architecture", "instance"} <= set(parts)


def test_a_corrupted_cubin_is_built_again(disk: Cache) -> None:
    source = source_of(SIMPLE)
    first = compiling.compile_instance(source, "cuda_build::greedy", Instance(torch.float32), "sm_80")
    (entry,) = disk.entries()
    (entry / compiling.CUBIN).write_bytes(b"\x7fELF, and something else")
    disk._known.clear()
    again = compiling.compile_instance(source, "cuda_build::greedy", Instance(torch.float32), "sm_80")
    assert again.image[:4] == b"\x7fELF"
    assert (len(again.image), again.name, again.resources) == (len(first.image), first.name, first.resources)


def test_a_kernel_may_include_the_headers_of_cuda() -> None:
    if not any((folder / "crt" / "host_defines.h").exists() for folder in nvrtc.include_directories()):
        pytest.skip("there are no headers of CUDA here: nvidia-cuda-runtime and nvidia-cuda-crt bring them")
    source = source_of(
        """
#include <cuda_fp16.h>
__global__ void greedy(Contiguous<const Half> x, Contiguous<Half> y) {
  const __half2* pairs = reinterpret_cast<const __half2*>(x.data);
  reinterpret_cast<__half2*>(y.data)[threadIdx.x] = __hadd2(pairs[threadIdx.x], pairs[0]);
}
"""
    )
    assert compiling.compile_instance(source, "cuda_build::greedy", Instance(), "sm_90").resources.spills == 0


def test_another_architecture_of_the_same_family_runs_what_the_older_one_does() -> None:
    assert compiling.nearest_architecture("sm_90") == "sm_90"
    assert compiling.nearest_architecture("sm_90a") == "sm_90a"
    assert compiling.nearest_architecture("sm_84") == "sm_80"
    with pytest.raises(errors.ToolchainError) as caught:
        compiling.nearest_architecture("sm_999")
    assert caught.value.problem == "NVRTC does not compile for `sm_999`"
    assert "sm_90" in (caught.value.expected or "")


def test_the_header_and_python_say_the_same() -> None:
    text = compiling.header()
    assert f"constexpr int max_dim = {MAX_DIM};" in text
    assert f"constexpr int version = {VERSION};" in text
    listed = re.search(r"enum ParameterType : int \{(.*?)\}", text)
    assert listed is not None
    assert len(listed[1].split(",")) == len(PARAMETER_TYPES)
    layouts = re.search(r"enum Layout : int \{(.*?)\}", text)
    assert layouts is not None
    assert [each.split("=")[0].strip() for each in layouts[1].split(",")] == [
        each.upper().replace("-", "_") for each in LAYOUTS
    ]
    for name, number in re.findall(r"dtype_of<(\w+)> \{ static constexpr int value = (\d+); \}", text):
        wanted = {"Half": "float16", "BFloat16": "bfloat16", "float": "float32", "double": "float64"}
        plain = wanted.get(name, name.removesuffix("_t")).replace("long", "int64")
        assert NUMBERED["ScalarType"][int(number)] is getattr(torch, plain.split(" ")[0]), name


def test_templates_are_read() -> None:
    source = source_of(
        'extern "C" { }\n// template <class U> __global__ void greedy(int)\n'
        "template <typename T, int K, bool FLAG = (K > 3), int LAST = 2>\n"
        "__global__ void __launch_bounds__(256, 2)\ngreedy(View<const T> x) {}\n"
    )
    assert [(each.name, each.is_type, each.default) for each in source.parameters] == [
        ("T", True, False),
        ("K", False, False),
        ("FLAG", False, True),
        ("LAST", False, True),
    ]
    assert source.at == 5
    assert name_expression(source, Instance(torch.float16, (("K", 7),))) == "greedy<opsmith::Half, (7)>"
    assert (
        name_expression(source, Instance(torch.float32, (("FLAG", True), ("K", -1))))
        == "greedy<float, (-1), true>"
    )
    plain = source_of('extern "C" __global__ void greedy(View<float> x) {}')
    assert (plain.template, plain.parameters, name_expression(plain, Instance())) == (False, (), "greedy")


def test_an_error_far_inside_is_told_at_the_author_s_line() -> None:
    source = source_of("\n__global__ void greedy(View<const float> x) {}\n")
    log = (
        'opsmith_cuda.h(93): error: static assertion failed with "as many indices"\n'
        "    static_assert(N == 1);\n    ^\n"
        '          detected during instantiation of "T &opsmith::View<T, N>::operator()" at line 2 of '
        f"{source.path}\n\n"
        "other.h(3): error: something else\n"
        '1 error detected in the compilation of "kernel.cu".\n'
    )
    found = diagnostics(log, source)
    assert [(each.line, each.column, each.text) for each in found] == [
        (2, None, 'static assertion failed with "as many indices"')
    ]


def test_an_nvrtc_that_does_not_load_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"no library")
    real = nvrtc.nvrtc_files()
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: (nvrtc.NvrtcFile(str(broken), "broken"), *real))
    assert nvrtc.find_nvrtc().version >= (12, 0)
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: (nvrtc.NvrtcFile(str(broken), "broken"),))
    with pytest.raises(errors.ToolchainError, match="there is no NVRTC") as caught:
        nvrtc.find_nvrtc()
    assert str(broken) in (caught.value.got or "")


def test_torch_s_own_version_of_cuda_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, name in (("cu13", "libnvrtc.so.13"), ("cuda_nvrtc", "libnvrtc.so.12")):
        library = tmp_path / "nvidia" / folder / "lib" / name
        library.parent.mkdir(parents=True)
        library.write_bytes(b"")
        (library.parent / "libnvrtc-builtins.so").write_bytes(b"")
        (library.parent / "libnvrtc.alt.so.13").write_bytes(b"")
    monkeypatch.setattr(nvrtc.sys, "path", [str(tmp_path)])
    for cuda, first in (("12.8", "libnvrtc.so.12"), ("13.0", "libnvrtc.so.13"), (None, "libnvrtc.so.13")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = [Path(each.path).name for each in nvrtc.nvrtc_files.__wrapped__() if "/" in each.path]
        assert found[0] == first
        assert not any("builtins" in each or "alt" in each for each in found)


# Occupancy.

CONFIGURATIONS = [
    (threads, registers, shared)
    for threads in (1, 32, 96, 128, 256, 480, 1024)
    for registers in (16, 32, 40, 64, 65, 128, 255)
    for shared in (0, 1000, 12_000, 48_000, 99_000)
]


@pytest.mark.parametrize("number", [80, 86, 89, 90, 100, 120])
def test_occupancy_is_what_nvidia_s_own_header_computes(number: int, tmp_path: Path) -> None:
    """The header has the arithmetic; the sizes of multiprocessors are from the programming guide."""
    if not nvrtc.include_directories():
        pytest.skip("there are no headers of CUDA here: nvidia-cuda-runtime brings them")
    sizes = MULTIPROCESSORS[number]
    calls = "\n".join(
        f"one({threads}, {registers}, {shared});" for threads, registers, shared in CONFIGURATIONS
    )
    (tmp_path / "own.cpp").write_text(
        f"""
#include <cstdio>
#include <cuda_occupancy.h>
static cudaOccDeviceProp device;
static void one(int threads, int registers, int shared) {{
  cudaOccFuncAttributes kernel;
  kernel.maxThreadsPerBlock = 1024;
  kernel.numRegs = registers;
  kernel.sharedSizeBytes = 0;
  kernel.maxDynamicSharedSizeBytes = {sizes.shared_of_block};
  kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  cudaOccDeviceState state;
  state.carveoutConfig = 100;
  cudaOccResult result;
  int failed = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
  std::printf("%d\\n", failed ? -1 : result.activeBlocksPerMultiprocessor);
}}
int main() {{
  device.computeMajor = {number // 10};
  device.computeMinor = {number % 10};
  device.maxThreadsPerBlock = 1024;
  device.maxThreadsPerMultiprocessor = {sizes.warps * 32};
  device.regsPerBlock = device.regsPerMultiprocessor = 65536;
  device.warpSize = 32;
  device.sharedMemPerBlock = 49152;
  device.sharedMemPerMultiprocessor = {sizes.shared};
  device.sharedMemPerBlockOptin = {sizes.shared_of_block};
  device.reservedSharedMemPerBlock = {sizes.reserved};
  device.numSms = 100;
{calls}
}}
"""
    )
    include = [f"-I{folder}" for folder in nvrtc.include_directories()]
    subprocess.run(["g++", "-w", *include, "own.cpp", "-o", "own"], cwd=tmp_path, check=True)
    said = subprocess.run([tmp_path / "own"], capture_output=True, text=True, check=True).stdout.split()
    for (threads, registers, shared), blocks in zip(CONFIGURATIONS, said, strict=True):
        warps = -(-threads // 32)
        right = int(blocks) * warps / sizes.warps
        assert occupancy(f"sm_{number}", threads, registers, shared) == right, (threads, registers, shared)


def test_occupancy_of_what_is_not_known() -> None:
    assert occupancy("sm_999", 256, 32, 0) is None
    assert occupancy("sm_90a", 256, 32, 0) == 1.0
    assert occupancy("sm_80", 2048, 32, 0) == 0.0


# What the libraries refuse.


class Failing:
    """An NVRTC whose compiler fails in another way than by refusing a source."""

    def __init__(self) -> None:
        self.nvrtcVersion = self.nvrtcGetNumSupportedArchs = lambda *_: 0
        self.nvrtcGetSupportedArchs = self.nvrtcCreateProgram = self.nvrtcDestroyProgram = lambda *_: 0
        self.nvrtcGetProgramLogSize = self.nvrtcGetProgramLog = lambda *_: 0
        self.nvrtcCompileProgram = lambda *_: 7
        self.nvrtcGetErrorString = Said()


class Said:
    """A C function that says what a status is."""

    restype: Any = None

    def __call__(self, status: int) -> bytes:
        return b"NVRTC_ERROR_BUILTIN_OPERATION_FAILURE"


def test_an_nvrtc_that_is_not_whole() -> None:
    compiler = nvrtc.Nvrtc(Failing(), nvrtc.NvrtcFile("/here/libnvrtc.so.13", "one"))
    with pytest.raises(errors.ToolchainError) as caught:
        compiler.compile("", options=[])
    assert caught.value.message().splitlines() == [
        "NVRTC fails: nvrtcCompileProgram returns NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        "  expected: a complete NVRTC, of the same version as the files in its folder",
        "  got: /here/libnvrtc.so.13",
        "  hint: install NVRTC again: `pip install --force-reinstall nvidia-cuda-nvrtc`",
    ]


def test_an_nvrtc_that_tells_no_resources(disk: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "read_resources", lambda log, name: None)
    with pytest.raises(errors.ToolchainError) as caught:
        compiling.compile_instance(source_of(SIMPLE), "cuda_build::greedy", Instance(torch.float32), "sm_80")
    assert caught.value.problem == "NVRTC does not report the resources of the kernel"
    assert "Used " in (caught.value.got or "")


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARIES", ("libcuda-that-is-not-there.so.1",))
    with pytest.raises(errors.ToolchainError) as caught:
        driver.find_driver.__wrapped__()
    assert (caught.value.problem, caught.value.expected) == (
        "there is no CUDA driver",
        "libcuda-that-is-not-there.so.1",
    )


INCLUDES = {
    "quoted": '#include "number.cuh"',
    "macro": '#define NUMBER "number.cuh"\n#include NUMBER',
    "comment-before": '/* of the value */ #include "number.cuh"',
    "comment-inside": '#include /* of the value */ "number.cuh"',
    "continued": '#include \\\n"number.cuh"',
    "digraph": '%:include "number.cuh"',
    "brackets": '#include <number.cuh>\n#include "opsmith_cuda.h"',
}


def number_header(number: object) -> str:
    return f"__device__ inline float number() {{ return {number}; }}\n"


@pytest.mark.parametrize("include", INCLUDES)
def test_headers_of_the_author_s_own_are_found_beside_the_file_and_part_of_the_key(
    include: str, tmp_path: Path
) -> None:
    header = tmp_path / "number.cuh"
    text = f"{INCLUDES[include]}\n__global__ void f(Contiguous<float> y) {{ y[0] = number(); }}\n"
    (tmp_path / "f.cu").write_text(text)
    images = []
    for number in (1, 2, 1):
        header.write_text(number_header(number))
        source = cuda_source(
            "own::f", cuda=None, cuda_file=tmp_path / "f.cu", entries=[None], declared=__file__
        )
        images.append(compiling.compile_instance(source, "own::f", Instance(), "sm_90").image)
    assert images[0] == images[2] != images[1]
    header.write_text(number_header("three"))
    with pytest.raises(errors.CompileError, match=rf"got: {header}:1:\d+: identifier \"three\" is undefined"):
        compiling.compile_instance(source, "own::f", Instance(), "sm_90")


def test_a_header_saved_while_nvrtc_runs_is_not_mixed_in(
    disk: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "number.cuh"
    (tmp_path / "f.cu").write_text(
        '#include "number.cuh"\n__global__ void f(Contiguous<float> y) { y[0] = number(); }\n'
    )
    source = cuda_source("own::f", cuda=None, cuda_file=tmp_path / "f.cu", entries=[None], declared=__file__)
    compiled, saved = compiling._compile, iter([2])

    def compile_and_save(*args: Any, **options: Any) -> Any:
        result = compiled(*args, **options)
        for number in saved:
            header.write_text(number_header(number))
        return result

    monkeypatch.setattr(compiling, "_compile", compile_and_save)
    header.write_text(number_header(1))
    image = compiling.compile_instance(source, "own::f", Instance(), "sm_90").image
    assert image == compiling.compile_instance(source, "own::f", Instance(), "sm_90").image
    header.write_text(number_header(1))
    assert image != compiling.compile_instance(source, "own::f", Instance(), "sm_90").image

    saved = iter(range(3, 100))

    def save_each_time(*args: Any, **options: Any) -> Any:
        header.write_text(number_header(next(saved)))
        return compiled(*args, **options)

    monkeypatch.setattr(compiling, "_compile", save_each_time)
    header.write_text(number_header(1000))
    with pytest.raises(errors.CompileError, match="the headers of the kernel change while it is compiled"):
        compiling.compile_instance(source, "own::f", Instance(), "sm_90")


@pytest.mark.parametrize(
    "attributes",
    [
        "__launch_bounds__((256))",
        "__launch_bounds__(8 * sizeof(double) * 4, (2))",
        "__launch_bounds__(int(sizeof(float) * (32 + 32)))",
        "__launch_bounds__(256) __maxnreg__(32)",
        "__cluster_dims__(2, 1, 1) __launch_bounds__(256)",
    ],
)
def test_attributes_of_a_kernel_and_its_launch_bounds(attributes: str) -> None:
    for text in (f"__global__ {attributes} void f", f"__global__ void {attributes} f"):
        source = source_of(f"{text}(Contiguous<float> y) {{ y[0] = threadIdx.x; }}", "f")
        if "__maxnreg__" in attributes:  # NVRTC takes no bound beside it
            continue
        assert compiling.compile_instance(source, "own::f", Instance(), "sm_90").max_threads == 256


def test_a_kernel_without_launch_bounds_has_no_limit_of_its_own() -> None:
    source = source_of("__global__ void f(Contiguous<float> y) { y[0] = threadIdx.x; }", "f")
    assert compiling.compile_instance(source, "own::f", Instance(), "sm_90").max_threads is None
