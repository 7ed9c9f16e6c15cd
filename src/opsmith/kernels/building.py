"""What `op.kernel(...)` makes of a source: a kernel that is built when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from types import FrameType
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cpp.generating import TYPES
from opsmith.build.cpp.source import CppSource, cpp_source
from opsmith.core.cuda_options import SOURCES
from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator
from opsmith.kernels.cpp import CppKernel

_SOURCES = "one of a function in Python, `cpp=`, `cpp_file=`, `cuda=`, `cuda_file=` and `triton=`"


def build_kernel(
    operator: Operator[..., Any],
    device: str,
    *,
    frame: FrameType | None,
    function: Callable[..., Any] | None,
    dtypes: Iterable[torch.dtype] | None,
    cpp: str | None,
    cpp_file: str | PathLike[str] | None,
    entry: str | None,
    strict: bool,
    options: Mapping[str, Any] | None = None,
) -> BuiltKernel:
    """Make a kernel of a source.

    Args:
        operator: Whose kernel it is.
        device: Type of device.
        frame: Where it is declared.
        function: A kernel in Python, which is none from source.
        dtypes: What a template is made for.
        cpp: Text in C++.
        cpp_file: A file of it.
        entry: Name of the function in it.
        strict: Whether it is an error that it cannot be built here.
        options: A source in CUDA C++ or Triton, and how it is launched.

    Raises:
        UsageError: If the words do not fit one another.
        KernelSourceError, KernelDtypeError, LaunchError: If the source, a dtype or a launch is none.
    """
    options = dict(options or {})
    others = {name: options.pop(name, None) for name in SOURCES}
    triton = options.pop("triton", None)
    sources = {"cpp": cpp, "cpp_file": cpp_file, **others, "triton": triton}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1 or function is not None:
        shown = [*(["a function"] if function is not None else []), *(f"`{name}=`" for name in given)]
        raise errors.UsageError(
            "a kernel has one source",
            operator=operator.name,
            expected=_SOURCES,
            got=" and ".join(shown or [f"`{name}=`" for name in options]) or "`entry=` or `strict=` alone",
            hint="give each kernel by a call of `op.kernel(...)` of its own",
        )
    if any(value is not None for value in others.values()):
        from opsmith.kernels.cuda_building import build_cuda_kernel

        return build_cuda_kernel(
            operator,
            device,
            **others,
            entry=entry,
            declared=None if frame is None else frame.f_code.co_filename,
            dtypes=_ordered(operator.name, "CUDA C++", dtypes),
            options=options,
            strict=strict,
        )
    if triton is not None:
        from opsmith.kernels.triton_building import build_triton_kernel

        return build_triton_kernel(
            operator, device, triton, entry=entry, dtypes=dtypes, options=options, strict=strict
        )
    if options:
        raise errors.UsageError(
            "a kernel in C++ is not launched",
            operator=operator.name,
            expected="`entry=`, `dtypes=` and `strict=`",
            got=", ".join(f"`{name}=`" for name in options),
            hint="leave it out; `grid=` and what belongs to it are for `cuda=` and `triton=`",
        )
    if device != "cpu":
        raise errors.UsageError(
            f"a kernel in C++ is declared for `{device}`",
            operator=operator.name,
            expected="`cpu`, where C++ runs",
            got=repr(device),
            hint="write `op.kernel('cpu', cpp=...)`",
        )
    declared = frame.f_code.co_filename if frame is not None else None

    def read() -> CppSource:
        return cpp_source(operator.name, cpp=cpp, cpp_file=cpp_file, entry=entry, declared=declared)

    kernel = CppKernel(operator, read, _ordered(operator.name, "C++", dtypes), strict=strict)
    if dtypes is not None and not kernel.source.template:
        raise errors.KernelDtypeError(
            "dtypes are given for a C++ function that is no template",
            operator=operator.name,
            argument="dtypes",
            expected="`template <class T>` before the function",
            got=f"`void {kernel.entry}(...)`",
            where=kernel.where,
            hint="leave `dtypes=` out: the views in its parameters say what it takes",
        )
    return kernel


def _ordered(
    operator: str, language: str, dtypes: Iterable[torch.dtype] | None
) -> tuple[torch.dtype, ...] | None:
    if dtypes is None:
        return None
    unknown = [dtype for dtype in dtypes if dtype not in TYPES]
    if unknown:
        raise errors.KernelDtypeError(
            f"a kernel in {language} is declared for a dtype that has no type there",
            operator=operator,
            argument="dtypes",
            expected=", ".join(str(dtype) for dtype in TYPES),
            got=", ".join(sorted(map(str, unknown))),
            hint="leave it out: the reference computes it",
        )
    return tuple(dtype for dtype in TYPES if dtype in set(dtypes))
