"""Errors for kernels that a CPU compiler refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from opsmith import errors
from opsmith.kernels.common.gpu_resources import ARCHITECTURES
from opsmith.kernels.cpp.diagnostics import compile_error, own_headers, quoted_errors
from opsmith.kernels.cuda.compiler import Instance, compile_to_ptx, describe_instances
from opsmith.kernels.cuda.emulation.host_headers import (
    device_headers,
    including_line,
    kernel_texts,
    nvidia_folders,
)
from opsmith.kernels.cuda.source import CudaSource
from opsmith.kernels.cuda.standard_library import missing_hint

_IN_UNSUPPORTED = re.compile(
    r"unsupported/(?P<name>[^:\n]+):\d+(?::\d+)?: (?:fatal )?error: (?:#error )?(?P<text>.* not emulated)$",
    re.MULTILINE,
)
_INLINE_PTX = "opsmith_inline_ptx"
_ATTRIBUTE = re.compile(
    r"(?:call to '[^\n]*' declared with (?:attribute error|'error' attribute)|'[^'\n]*' is unavailable): "
)
"""Text that compilers print before the text of a function's attribute `error` or `unavailable`."""
_ERROR = re.compile(r"^(?P<file>[^\n]+?):\d+(?::\d+)?: (?:fatal )?error: (?P<text>[^\n]*)", re.MULTILINE)
_NAMES = re.compile(
    r"'[^'\n]*\b(?:__|cuda|CU|tex[1-3C]|surf[1-3C]|syncthreads_|make_|(?:double|u?long(?:long)?)\d)\w*[^'\n]*'|"
    r"'(?:all|any|ballot|d(?:add|mul|sub)|fdivide|r?normf?|[a-z]+2[a-z]+)'"
)
"""Names that GPU compilers know and that the emulation may lack, in the quotes of an error."""
_HEADER_MISSING = re.compile(r"No such file or directory|file not found")
_ASKS_FOR_A_GPU = re.compile(r"\b(?:__CUDA\w*|__NVCC__|NV_IF_(?:ELSE_)?TARGET)\b")
"""Macros that make the text differ for a GPU compiler."""


def refused(
    printed: str, source: CudaSource, operator: str, instances: Sequence[Instance] = ()
) -> errors.CompileError | errors.NotEmulatedError:
    """Return the error for a kernel that a CPU compiler refuses: it is wrong, or it needs a GPU.

    A feature that the emulation names as unsupported is not emulated. Otherwise NVRTC decides, if it is
    installed. Without NVRTC, the kernel is wrong unless a GPU compiler may accept it.

    Args:
        printed: Output of the compiler.
        source, operator, instances: The source, operator and instances that it compiles.
    """
    unsupported = _IN_UNSUPPORTED.search(printed)
    got = quoted_errors(_ATTRIBUTE.sub("", printed), source, own_headers(source))
    hint = missing_hint(printed)
    named = bool(unsupported or hint or _INLINE_PTX in printed or _ATTRIBUTE.search(printed))
    if unsupported is not None:
        line = including_line(source, unsupported["name"])
        got = f"{source.path}:{line}: {unsupported['text']}\n    {source.quoted(line).strip()}"
    elif _INLINE_PTX in printed:
        lines = re.sub(rf"[^\n]*?: [^\n]*{_INLINE_PTX}[^\n]*", _named_ptx, got).splitlines()
        got = "\n".join(lines[:3])  # later errors follow from these
    if not named:
        verdict = by_nvrtc(source, operator, instances)
        if isinstance(verdict, errors.CompileError):
            return verdict
        if verdict is None and not _may_be_of_a_gpu(printed, source):
            return compile_error("the C++ compiler", source, operator, got)
    return errors.NotEmulatedError(
        "the CUDA kernel cannot be run on the CPU",
        operator=operator,
        got="\n".join(f"    {line}" for line in got.splitlines()).lstrip(),
        where=source.where,
        hint=hint
        or (
            "check that the header is in the kernel's folder, or is installed"
            if _HEADER_MISSING.search(got) and not named
            else "put code that only a GPU can run after `#ifdef __CUDA_ARCH__`, and equivalent plain C++ "
            "after `#else`"
        ),
    )


def by_nvrtc(
    source: CudaSource, operator: str, instances: Sequence[Instance]
) -> errors.CompileError | Literal["taken"] | None:
    """Return NVRTC's error for some instances, or `taken` if it accepts them; None without NVRTC."""
    try:
        if instances:
            describe_instances(source, operator, instances, ARCHITECTURES[-1])
        for each in instances:
            compile_to_ptx(source, operator, each, ARCHITECTURES[-1])
    except errors.CompileError as error:
        return error
    except errors.ToolchainError:
        return None
    return "taken" if instances else None


def _may_be_of_a_gpu(printed: str, source: CudaSource) -> bool:
    """Return True if a GPU compiler may accept a text that a CPU compiler refuses, by the first error.

    This is possible if the error names a GPU feature or a declaration of the emulation, if a header is
    missing, if the error is in a header of NVIDIA, or if the text differs for a GPU. A syntax error is always
    the author's.
    """
    found = [*_ERROR.finditer(printed)]
    if not found:  # the error comes from the assembler or the linker
        return True
    first, about = found[0], printed[: found[1].start()] if found[1:] else printed
    if _NAMES.search(first["text"]) or _HEADER_MISSING.search(first["text"]):
        return True
    if any(f"{each.name}:" in about for each in device_headers()):
        return True
    file = Path(first["file"]).resolve()  # compilers print a header's path with or without symbolic links
    if any(file.is_relative_to(folder.resolve()) for folder in nvidia_folders(source)):
        return True
    return not first["text"].startswith("expected ") and any(
        map(_ASKS_FOR_A_GPU.search, kernel_texts(source))
    )


def _named_ptx(match: re.Match[str]) -> str:
    place = re.match(r".*?:\d+(?::\d+)?: ", match[0])
    return f"{place[0] if place else ''}inline PTX is not emulated"
