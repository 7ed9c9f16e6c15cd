"""Headers for a CPU compiler that replace, complete or refuse CUDA's headers."""

from __future__ import annotations

import re
from pathlib import Path

from opsmith.build.source_text import includes_of
from opsmith.kernels.cuda.nvrtc import include_directories
from opsmith.kernels.cuda.source import CudaSource

HERE = Path(__file__).parent

UNSUPPORTED = {
    "cooperative_groups.h": "cooperative groups are",
    "cooperative_groups/memcpy_async.h": "cooperative groups are",
    "cooperative_groups/reduce.h": "cooperative groups are",
    "cooperative_groups/scan.h": "cooperative groups are",
    "cub/cub.cuh": "cub is",
    "cub/block/block_reduce.cuh": "cub is",
    "cub/block/block_scan.cuh": "cub is",
    "cub/warp/warp_reduce.cuh": "cub is",
    "cuda/barrier": "`cuda::barrier` is",
    "cuda/pipeline": "`cuda::pipeline` is",
    "cuda_pipeline.h": "asynchronous copies are",
    "cute/tensor.hpp": "CuTe is",
    "cutlass/cutlass.h": "CUTLASS is",
    "mma.h": "the matrix units (`wmma`) are",
    "texture_fetch_functions.h": "textures are",
    "thrust/device_vector.h": "Thrust is",
}
"""Headers of features that are not emulated, with the subject of the message."""
_EMPTY = (
    "cuda.h",
    "cuda_runtime.h",
    "cuda_runtime_api.h",
    "device_launch_parameters.h",
    "device_functions.h",
)
"""Headers whose declarations exist without them."""
_HALVES = {
    "cuda_fp16.h": "__half, __half2, half, __half2float, __float2half_rn, __halves2half2",
    "cuda_bf16.h": "__nv_bfloat16, __nv_bfloat162, bfloat16, __bfloat162float, __float2bfloat16_rn, "
    "__halves2bfloat162",
}
"""Headers of half precision, with the arguments of `EMULATED_HALVES`, which completes them."""
_HALF = """\
#pragma once
#include_next <{name}>
#include "device_halves.h"
{first}EMULATED_HALVES({arguments})
"""
_ASSERT = """\
#undef assert
#define assert(...) EMULATED_ASSERT(#__VA_ARGS__, __VA_ARGS__)
"""
_INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"](?P<name>[^>"\n]+)[>"]', re.MULTILINE)
_TARGET = """\
#pragma once
#define EMULATED_BARE_EMULATED_OPENED
#define EMULATED_OPENED(...) EMULATED_OPENED __VA_ARGS__
#define EMULATED_JOIN(...) EMULATED_BARE_##__VA_ARGS__
#define EMULATED_BARE(...) EMULATED_JOIN(__VA_ARGS__)
#define EMULATED_WHERE_1(yes, no) EMULATED_BARE(EMULATED_OPENED yes)
#define EMULATED_WHERE_0(yes, no) EMULATED_BARE(EMULATED_OPENED no)
#define EMULATED_WHERE_(c, yes, no) EMULATED_WHERE_##c(yes, no)
#define EMULATED_WHERE(c, yes, no) EMULATED_WHERE_(c, yes, no)
#define NV_IS_HOST 1
#define NV_ANY_TARGET 1
#define NV_IS_DEVICE 0
#define NV_NO_TARGET 0
{none}
#define EMULATED_THIRD(c, yes, no, ...) EMULATED_WHERE(c, yes, no)
#define NV_IF_TARGET(c, ...) EMULATED_THIRD(c, __VA_ARGS__, (), ())
#define NV_IF_ELSE_TARGET(c, yes, no) EMULATED_WHERE(c, yes, no)
"""
"""CCCL's <nv/target> for a CPU: <cuda_fp16.h> includes it, but NVIDIA's package lacks it."""


def device_headers() -> list[Path]:
    """Return the headers that are included before every kernel."""
    return sorted(HERE.glob("*.h"))


def kernel_texts(source: CudaSource) -> list[str]:
    """Return the text of a kernel, and the texts of the author's headers."""
    return [source.text, *includes_of(source.text, source.folder).values()]


def nvidia_folders(source: CudaSource) -> list[Path]:
    """Return the folders of NVIDIA's headers if a kernel includes such a header; else an empty list."""
    names = {match["name"] for text in kernel_texts(source) for match in _INCLUDED.finditer(text)}
    names -= {*UNSUPPORTED, *_EMPTY}
    folders = include_directories()
    return [*folders] if any((folder / name).is_file() for folder in folders for name in names) else []


def include_flags(source: CudaSource, directory: Path) -> list[str]:
    """Write the headers that replace NVIDIA's, and return the flags with which a kernel finds headers."""
    texts = {
        **{f"unsupported/{name}": f"#error {each} not emulated\n" for name, each in UNSUPPORTED.items()},
        **{f"unsupported/{name}": "#pragma once\n" for name in _EMPTY},
        **{f"unsupported/{name}": _ASSERT for name in ("assert.h", "cassert")},
    }
    flags = ["-I", "unsupported", "-iquote", "."]
    flags += [] if source.folder is None else ["-iquote", source.folder]
    nvidia = nvidia_folders(source)
    for folder in nvidia:
        flags += ["-isystem", str(folder)]
    if nvidia:
        for name, arguments in _HALVES.items():
            first = "#include <cuda_fp16.h>\n" if name == "cuda_bf16.h" else ""
            texts[f"unsupported/{name}"] = _HALF.format(name=name, first=first, arguments=arguments)
        versions = [f"{number}{letter}" for number in range(35, 130) for letter in ("", "a", "f")]
        words = ("PROVIDES_SM_", "IS_EXACTLY_SM_", "HAS_FEATURE_SM_")
        none = "\n".join(f"#define NV_{word}{version} 0" for word in words for version in versions)
        texts["missing/nv/target"] = _TARGET.format(none=none)
        flags += ["-idirafter", "missing"]
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return flags


def including_line(source: CudaSource, name: str) -> int:
    """Return the line on which a kernel includes a header; the kernel's own line if another header does."""
    for match in _INCLUDED.finditer(source.text):
        if match["name"] == name:
            return source.line + source.text.count("\n", 0, match.start("name"))
    return source.at
