"""CUDA kernels that use the standard library of C++: what they have without it, and what brings the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.cuda import nvrtc
from opsmith.kernels.cuda.compiler import Instance, compile_instance
from opsmith.kernels.cuda.source import cuda_source

KERNEL = """{include}
__global__ void value(View<const float, 1> x, View<float, 1> y) {{
  y(0) = {value};
}}
"""
SUBJECT = "standard_library::value"


def declared(value: str, include: str = "") -> Any:
    @opsmith.operator(SUBJECT)
    def reference(x: Tensor) -> Tensor:
        return x.new_full(x.shape, torch.inf)

    return reference.kernel(
        "cuda", cuda=KERNEL.format(include=include, value=value), entry="value", grid=1, block=1
    )


def compiled(value: str, include: str = "") -> Any:
    text = KERNEL.format(include=include, value=value)
    source = cuda_source(SUBJECT, cuda=text, cuda_file=None, entries=["value"], declared=None)
    return compile_instance(source, SUBJECT, Instance(), "sm_90")


@pytest.fixture
def other_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Headers are searched again, before and after."""
    yield
    nvrtc.include_directories.cache_clear()
    nvrtc.headers_version.cache_clear()


def with_cccl(root: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package like those of CCCL: one folder with CUDA's headers, or one of its own."""
    folder = root / "nvidia" / ("cu13/include/cccl" if version >= 13 else "cuda_cccl/include")
    (folder / "cuda" / "std").mkdir(parents=True)
    (folder / nvrtc.CCCL).write_text("namespace cuda { namespace std { constexpr float limit = 7; } }\n")
    monkeypatch.syspath_prepend(root)
    nvrtc.include_directories.cache_clear()
    nvrtc.headers_version.cache_clear()


@pytest.mark.usefixtures("other_folders")
@pytest.mark.parametrize(("version", "fits"), [("13000", True), ("12080", False), ("", True)])
def test_headers_that_lie_in_two_packages_are_both_found(
    version: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types, other = tmp_path / "types", tmp_path / "other"
    for file in (types / "cuda_fp16.h", other / "cuda_fp16.h", other / nvrtc.CRT):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (types / "cuda.h").write_text("#define CUDA_VERSION 13000\n")
    if version:
        (other / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    monkeypatch.setattr(nvrtc, "_folders", lambda *names: iter([types, other]))
    nvrtc.include_directories.cache_clear()
    assert nvrtc.include_directories() == ((types, other) if fits else (types,))


@pytest.mark.parametrize("value", ["INFINITY", "-INFINITY", "NAN"])
def test_infinity_and_nan_are_there_under_nvrtc_and_emulated(value: str) -> None:
    assert compiled(f"{value} * x(0)", f"constexpr float constant = {value};").image
    result = opsmith.emulate(declared(value), torch.ones(1))
    assert str(result.item()) == {"INFINITY": "inf", "-INFINITY": "-inf", "NAN": "nan"}[value]


@pytest.mark.parametrize(
    ("value", "include", "hint"),
    [
        ("1", "#include <limits>", "`<limits>`: write `#include <cuda/std/limits>`, which `pip install "),
        (
            "1",
            "#include <cuda/std/limits>",
            "`<cuda/std/limits>`: the header is part of CCCL: `pip install nvidia-cuda-cccl",
        ),
        (
            "1",
            "#include <cmath>",
            "`<cmath>`: leave the header out: without it, CUDA has functions of mathematics",
        ),
        ("1", "#include <climits>", "`<climits>`: write `#include <cuda/std/climits>`, which `pip install "),
        ("1", "#include <vector>", "`<vector>`: NVRTC has no standard library of C++"),
        ("std::numeric_limits<float>::max()", "", "and `cuda::std::numeric_limits`"),
        ("FLT_MAX", "", "`FLT_MAX`: write `#include <cuda/std/limits>`"),
        ("INT_MAX", "", "`INT_MAX`: write `#include <cuda/std/climits>`"),
        ("M_PI", "", "a constant of `#include <math_constants.h>` such as CUDART_PI"),
        ("std::exp(x(0))", "", "`std::exp`: write the name without `std::`: CUDA has it"),
        ("std::max(1.f, x(0))", "", "`std::max`: write the name without `std::`: CUDA has it"),
        ("none", "", "fix the first error; the later errors may follow from it"),
        ("1", '#include "none.h"', "fix the first error; the later errors may follow from it"),
    ],
)
def test_what_nvrtc_lacks_is_named_with_what_brings_it(
    value: str, include: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opsmith.kernels.cuda.standard_library.has_cccl", lambda: False)
    monkeypatch.setattr("opsmith.kernels.cuda.compiler.include_directories", list)
    with pytest.raises(errors.CompileError, match="NVRTC refuses the kernel") as caught:
        compiled(value, include)
    assert hint in (caught.value.hint or "")


@pytest.mark.usefixtures("other_folders")
def test_where_cccl_is_installed_no_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cccl(tmp_path, 13, monkeypatch)
    with pytest.raises(errors.CompileError) as caught:
        compiled("1", "#include <limits>")
    assert caught.value.hint == (
        "`<limits>`: write `#include <cuda/std/limits>`, and `cuda::std::numeric_limits`"
    )


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.usefixtures("other_folders")
@pytest.mark.parametrize("version", [12, 13])
def test_the_headers_of_a_package_of_cccl_are_found(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = nvrtc.headers_version()
    with_cccl(tmp_path, version, monkeypatch)
    assert nvrtc.has_cccl()
    assert nvrtc.headers_version() != before  # so that kernels are built again
    include = "#include <cuda/std/limits>"
    assert compiled("cuda::std::limit", include).image
    result = opsmith.emulate(declared("cuda::std::limit", include), torch.ones(1))
    assert result.item() == 7


def test_clock_is_the_kernel_s_beside_the_header_of_c() -> None:
    """CCCL's <cuda/std/cmath> includes <time.h> where it is compiled for a CPU."""
    assert opsmith.emulate(declared("clock() >= 0", "#include <time.h>"), torch.ones(1)).item() == 1


def test_emulation_names_the_package_of_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.kernels.cuda.emulation.host_headers.include_directories", list)
    with pytest.raises(errors.NotEmulatedError) as caught:
        opsmith.emulate(declared("1", "#include <cuda/std/none>"), torch.ones(1))
    assert (caught.value.hint or "").startswith(
        "`<cuda/std/none>`: the header is part of CCCL: `pip install nvidia-cuda"
    )


@pytest.mark.parametrize(
    ("version", "package"), [((13, 0), "nvidia-cuda-cccl"), ((12, 9), "nvidia-cuda-cccl-cu12")]
)
def test_the_package_is_that_of_the_version(
    version: tuple[int, int], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        def __init__(self) -> None:
            self.version = version

    monkeypatch.setattr(nvrtc, "find_nvrtc", Found)
    assert nvrtc.cccl_package() == package


def test_without_nvrtc_the_package_is_that_of_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise errors.ToolchainError("none")

    monkeypatch.setattr(nvrtc, "find_nvrtc", none)
    assert nvrtc.cccl_package() == "nvidia-cuda-cccl"
