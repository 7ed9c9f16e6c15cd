"""What `op.kernel("cuda", cuda=...)` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

Said = int | str | Callable[..., Any] | Sequence[int | str]
"""A number, an expression over sizes, a function of arguments and results, or up to three numbers."""


class CudaOptions(TypedDict, total=False):
    """A kernel in CUDA C++, and how it is compiled and launched.

    Attributes:
        cuda: The text: a `__global__` function whose parameters are the arguments and then the results.
        cuda_file: Or a file that holds it, beside the one that declares the kernel.
        entry: Name of the function in it; by default the operator's own.
        dtypes: What its template is made for; float32 and float64 by default.
        strict: Whether it is an error that it cannot be built here.
        grid: How many blocks, in up to three directions; `"ceil(result.numel / 256)"`, for example.
        block: How many threads a block has; 256 by default.
        shared: Bytes of dynamic shared memory.
        constants: The numbers of its template, by name: from sizes that few calls change.
        max_spills: How many bytes it may spill: `check` and `opsmith compile` hold it to that.
        max_registers: How many registers a thread may take.
    """

    cuda: str
    cuda_file: str | PathLike[str]
    entry: str
    dtypes: Any
    strict: bool
    grid: Said
    block: Said
    shared: Said
    constants: Mapping[str, Said]
    max_spills: int
    max_registers: int


SOURCES = ("cuda", "cuda_file")
LAUNCHING = ("grid", "block", "shared", "constants", "max_spills", "max_registers")
"""The words that are for a kernel in CUDA C++ alone."""
