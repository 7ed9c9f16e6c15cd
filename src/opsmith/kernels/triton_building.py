"""What `op.kernel("cuda", triton=...)` makes of a function in Triton."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from opsmith import errors
from opsmith.build.triton.source import POINTED, triton_source
from opsmith.core.operator import Operator
from opsmith.core.triton_options import WORDS
from opsmith.kernels.triton import DTYPES, TritonKernel


def build_triton_kernel(
    operator: Operator[..., Any],
    device: str,
    triton: Any,
    *,
    entry: str | None,
    dtypes: Iterable[torch.dtype] | None,
    options: Mapping[str, Any],
    strict: bool,
) -> TritonKernel:
    """Make a kernel of a function in Triton.

    Args:
        operator: Whose kernel it is.
        device: Type of device.
        triton: The function.
        entry: Name of a function in a source, which this is none of.
        dtypes: Those that it takes.
        options: As in `TritonOptions`.
        strict: Whether it is an error that Triton is missing.

    Raises:
        UsageError: If the words do not fit one another.
        KernelSourceError, KernelDtypeError: If the function, or a dtype, is none for Triton.
        KernelSignatureError, LaunchError: If it cannot be told what a parameter gets, or the grid.
    """
    if device != "cuda":
        raise errors.UsageError(
            f"a kernel in Triton is declared for `{device}`",
            operator=operator.name,
            expected="`cuda`, where Triton runs; `check` interprets it on the CPU",
            got=repr(device),
            hint="write `op.kernel('cuda', triton=...)`",
        )
    if entry is not None:
        raise errors.UsageError(
            "`entry=` is given for a kernel in Triton",
            operator=operator.name,
            expected="`triton=`, which is the function itself",
            got=f"`entry={entry!r}`",
            hint="leave it out",
        )
    others = [name for name in options if name not in WORDS]
    if others or options.get("grid") is None:
        raise errors.UsageError(
            "a kernel in Triton is given with words that it does not know"
            if others
            else "a kernel in Triton has no grid",
            operator=operator.name,
            expected=", ".join(f"`{name}=`" for name in WORDS),
            got=", ".join(f"`{name}=`" for name in others) or "`triton=` without `grid=`",
            hint="write `grid=lambda result, BLOCK: (triton.cdiv(result.numel(), BLOCK),)`",
        )
    unknown = [dtype for dtype in dtypes or () if dtype not in POINTED]
    if unknown:
        raise errors.KernelDtypeError(
            "a kernel in Triton is declared for a dtype that it has no pointer to",
            operator=operator.name,
            argument="dtypes",
            expected=", ".join(map(str, POINTED)),
            got=", ".join(sorted(map(str, unknown))),
            hint="leave it out: the reference computes it",
        )
    return TritonKernel(
        operator,
        triton_source(triton, operator.name),
        grid=options["grid"],
        constants=options.get("constants") or {},
        layouts=options.get("layouts") or {},
        dtypes=frozenset(DTYPES if dtypes is None else dtypes),
        strict=strict,
    )
