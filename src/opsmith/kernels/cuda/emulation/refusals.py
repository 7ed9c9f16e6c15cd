"""Errors for kernels that a compiler of the CPU refuses."""

from __future__ import annotations

import re

from opsmith import errors
from opsmith.kernels.cpp.diagnostics import own_headers, quoted_errors
from opsmith.kernels.cuda.emulation.host_headers import including_line
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
"""Words that compilers put before the text of a function's attribute `error` or `unavailable`."""
_UNKNOWN = re.compile(
    r"not declared|undeclared|no member named|has no member|does not name a type|unknown type"
)
"""Words of an error about a name, which a GPU's compiler may know."""


def refused(printed: str, source: CudaSource, operator: str) -> errors.NotEmulatedError:
    """Return the error for a kernel that a compiler of the CPU refuses.

    Args:
        printed: Output of the compiler.
        source: The author's source.
        operator: Name of the operator.
    """
    unsupported = _IN_UNSUPPORTED.search(printed)
    got = quoted_errors(_ATTRIBUTE.sub("", printed), source, own_headers(source))
    if unsupported is not None:
        line = including_line(source, unsupported["name"])
        got = f"{source.path}:{line}: {unsupported['text']}\n    {source.quoted(line).strip()}"
    elif _INLINE_PTX in printed:
        lines = re.sub(rf"[^\n]*?: [^\n]*{_INLINE_PTX}[^\n]*", _named_ptx, got).splitlines()
        got = "\n".join(lines[:3])  # what follows from it says nothing
    first = got.partition("\n")[0]  # others may follow from it
    of_a_gpu = unsupported or _INLINE_PTX in printed or _ATTRIBUTE.search(printed) or _UNKNOWN.search(first)
    return errors.NotEmulatedError(
        "the CUDA kernel cannot be run on the CPU",
        operator=operator,
        got="\n".join(f"    {line}" for line in got.splitlines()).lstrip(),
        where=source.where,
        hint=missing_hint(printed)
        or (
            "put what a GPU alone has between `#ifdef __CUDA_ARCH__` and `#else`, and behind that plain C++ "
            "that does the same"
            if of_a_gpu
            else "correct the first of these errors; those after it may follow from it"
        ),
    )


def _named_ptx(match: re.Match[str]) -> str:
    place = re.match(r".*?:\d+(?::\d+)?: ", match[0])
    return f"{place[0] if place else ''}inline PTX is not emulated"
