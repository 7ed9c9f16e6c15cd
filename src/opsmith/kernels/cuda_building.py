"""What `op.kernel("cuda", cuda=...)` makes of a source: a kernel that is compiled when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cuda.source import CudaSource, cuda_source
from opsmith.core.cuda_options import LAUNCHING
from opsmith.core.operator import Operator
from opsmith.kernels.cuda import CudaKernel, Limits
from opsmith.kernels.cuda_machine import TorchCuda
from opsmith.kernels.launching import launching_of


def build_cuda_kernel(
    operator: Operator[..., Any],
    device: str,
    *,
    cuda: str | None,
    cuda_file: str | PathLike[str] | None,
    entry: str | None,
    declared: str | None,
    dtypes: Sequence[torch.dtype] | None,
    options: Mapping[str, Any],
    strict: bool,
    machine: TorchCuda | None = None,
) -> CudaKernel:
    """Make a kernel of a source in CUDA C++.

    Args:
        operator: Whose kernel it is.
        device: Type of device.
        cuda: The text.
        cuda_file: Or a file of it.
        entry: Name of the function in it.
        declared: The file in which it is declared.
        dtypes: What a template is made for.
        options: As in `CudaOptions`.
        strict: Whether it is an error that it cannot be built here.
        machine: The GPUs; torch's by default.

    Raises:
        UsageError: If the words do not fit one another.
        KernelSourceError, KernelDtypeError, LaunchError: If the source, a dtype or a launch is none.
    """
    if device != "cuda":
        raise errors.UsageError(
            f"a kernel in CUDA C++ is declared for `{device}`",
            operator=operator.name,
            expected="`cuda`, where CUDA runs",
            got=repr(device),
            hint="write `op.kernel('cuda', cuda=...)`",
        )
    unknown = [name for name in options if name not in LAUNCHING]
    if unknown or "grid" not in options:
        raise errors.UsageError(
            "a kernel in CUDA C++ is given with words that it does not know"
            if unknown
            else "a kernel in CUDA C++ has no grid",
            operator=operator.name,
            expected=", ".join(f"`{name}=`" for name in LAUNCHING),
            got=", ".join(f"`{name}=`" for name in unknown) or "the source without `grid=`",
            hint="write for example `grid='ceil(result.numel / 256)', block=256`",
        )

    def read() -> CudaSource:
        source = cuda_source(operator.name, cuda=cuda, cuda_file=cuda_file, entry=entry, declared=declared)
        _check_template(source, operator.name, dtypes, options.get("constants", {}))
        return source

    return CudaKernel(
        operator,
        read,
        dtypes,
        launching_of(operator.specification, options),
        Limits(options.get("max_spills"), options.get("max_registers")),
        strict=strict,
        machine=machine,
    )


def _check_template(
    source: CudaSource, operator: str, dtypes: Sequence[torch.dtype] | None, constants: Mapping[str, Any]
) -> None:
    """Hold what is declared of a template to its parameters.

    Raises:
        KernelDtypeError: If dtypes are given for what is no template over them.
        LaunchError: If its numbers are not those that are declared.
    """
    if dtypes is not None and not source.over_dtype:
        raise errors.KernelDtypeError(
            "dtypes are given for a CUDA function that is no template over them",
            operator=operator,
            argument="dtypes",
            expected="`template <class T>` before the function",
            got=f"`__global__ void {source.entry}(...)`",
            where=source.where,
            hint="leave `dtypes=` out: the views in its parameters say what it takes",
        )
    needed = [each.name for each in source.parameters if not each.is_type and not each.default]
    missing = [name for name in needed if name not in constants]
    unknown = [name for name in constants if name not in source.constants]
    if missing or unknown:
        raise errors.LaunchError(
            "the constants of a CUDA kernel are not the numbers of its template",
            operator=operator,
            argument="constants",
            expected=f"a dict with {', '.join(f'`{name}`' for name in source.constants)}"
            if source.constants
            else "none: the template has no number",
            got=", ".join(f"`{name}`" for name in constants) or "none",
            where=source.where,
            hint=f"write `constants={{{(missing or ['K'])[0]!r}: 'x.shape[0]'}}`"
            if missing
            else f"leave `{unknown[0]}` out, or write `template <class T, int {unknown[0]}>`",
        )
