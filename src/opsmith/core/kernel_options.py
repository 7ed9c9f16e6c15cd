"""Options of `op.kernel(...)` for each language, for type checkers and editors.

No program imports them: `typing.get_type_hints` does not resolve the overloads of `op.kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from opsmith.core.kernels import Dtypes, Launch, LaunchValue

InitialValue = float | str | Callable[..., Any]
"""A number, an expression over sizes, or a function of arguments and results."""


class UnknownOption:
    """Type that no value has: type checkers show it for an option that a source's language does not have."""


class CudaOptions(TypedDict, total=False):
    """A kernel in CUDA C++, and how it is compiled and launched.

    Attributes:
        cuda: Source: a `__global__` function whose parameters are the arguments and then the results.
        cuda_file: A file with the source, in the folder of the file that declares the kernel.
        entry: Name of the function in it; by default the operator's own.
        dtypes: dtypes that its template is compiled for; float32 and float64 by default.
        strict: True to raise an error if it cannot be built here.
        grid: Number of blocks, in up to three dimensions; for example `"ceil(result.numel / 256)"`.
        block: Number of threads in a block; 256 by default.
        shared: Bytes of dynamic shared memory.
        constants: Integer parameters of its template, by name; use sizes that rarely change between calls.
        launches: Several kernels, one after the other, in place of `entry`, `grid`, `block`, `shared` and
            `constants`.
        initial: Values that fill results and scratch buffers before the launch, by name: a number, or an
            expression or a function as for a grid.
        scratch: Buffers that it gets after the results, by name: sizes as for a grid, then a dtype, or the
            name of an argument or result with the same dtype; `{"s": ("x.shape[0]", torch.float32)}`.
        deterministic: False if its rounding differs from run to run, as for floating-point sums by atomics:
            it takes no call under `torch.use_deterministic_algorithms(True)`.
        max_spills: Maximum number of bytes of spilled registers, checked by `check` and `opsmith compile`.
        max_registers: Maximum number of registers of a thread.
        copies: `"allowed"` if an argument that it writes in place may be copied into a layout that it takes,
            and back.
    """

    cuda: str
    cuda_file: str | PathLike[str]
    entry: str
    dtypes: Dtypes | None
    strict: bool
    grid: LaunchValue
    block: LaunchValue
    shared: LaunchValue
    constants: Mapping[str, LaunchValue]
    launches: Sequence[Launch]
    initial: Mapping[str, InitialValue]
    scratch: Mapping[str, Sequence[Any]]
    deterministic: bool
    max_spills: int
    max_registers: int
    copies: Literal["allowed"]


class TritonOptions(TypedDict, total=False):
    """A kernel in Triton, and how it is launched.

    Attributes:
        triton: A function whose parameters have names of arguments; plain, or decorated by Triton.
        grid: Number of programs: up to three numbers, or a function of arguments by name.
        constants: Its other parameters: values, or functions of arguments by name; `num_warps` too.
        layouts: Tensors that must be `channels-last`, or `contiguous` although it takes their strides.
        dtypes: dtypes of floating tensors that it takes; float16, bfloat16 and float32 by default.
        deterministic: As for a kernel in CUDA C++.
        strict: True to raise an error if Triton is missing.
        copies: `"allowed"` if an argument that it writes in place may be copied into a layout that it takes,
            and back.
    """

    triton: Callable[..., Any]
    grid: int | Sequence[int] | Callable[..., Any]
    constants: Mapping[str, Any]
    layouts: Mapping[str, str]
    dtypes: Dtypes | None
    deterministic: bool
    strict: bool
    copies: Literal["allowed"]
