"""Hints for CUDA kernels that use the standard library of C++, which NVRTC does not have."""

from __future__ import annotations

import re

from opsmith.kernels.cpp.codegen import implied_headers
from opsmith.kernels.cuda.nvrtc import cccl_package, has_cccl

_MISSING = re.compile(
    r"(?:cannot|could not) open source file \"(?P<nvrtc>[^\"]+)\"|"
    r"fatal error: (?P<gcc>[\w./]+): No such file|"
    r"fatal error: '(?P<clang>[^']+)' file not found|"
    r"identifier \"(?P<name>\w+)\" is undefined|namespace \"std\" has no member \"(?P<member>\w+)\""
)
_HINTS = {
    r"<c(?:math|stdint|stddef|assert|stdio|stdlib)>|<(?:math|stdint|stddef|assert|stdio|stdlib)\.h>": (
        "leave the header out: without it, CUDA has functions of mathematics, types such as `int64_t`, "
        "`assert`, `printf`, INFINITY and NAN"
    ),
    r"<(?:cuda|cub|thrust|nv)/.*>": "the header is part of CCCL: `pip install {package}`",
    r"M_\w+": "write the number, or a constant of `#include <math_constants.h>` such as CUDART_PI",
    r"std::(?:max|min|size_t|printf)|std::math": "write the name without `std::`: CUDA has it",
    r"<(?:limits|cfloat|float\.h)>|std::numeric_limits|(?:FLT|DBL)_\w+": "write "
    "`#include <cuda/std/limits>`{brought}, and `cuda::std::numeric_limits`",
    r"<(?:climits|limits\.h)>|U?(?:CHAR|SHRT|INT|LONG|LLONG)_(?:MAX|MIN)": "write "
    "`#include <cuda/std/climits>`{brought}",
    r"<[a-z_]+>|std::\w+": "NVRTC has no standard library of C++: `<cuda/std/...>` may have it{brought}",
}
"""Hints for headers, members of `std` and names, by regular expressions that match these."""


def missing_hint(printed: str) -> str | None:
    """Return a hint for a CUDA kernel that a compiler refuses; None if no part of a library is missing.

    Args:
        printed: Output of the compiler.

    Example:
        >>> missing_hint('kernel.cu(1): error: identifier "M_PI" is undefined')
        '`M_PI`: write the number, or a constant of `#include <math_constants.h>` such as CUDART_PI'
    """
    for found in _MISSING.finditer(printed):
        header = found["nvrtc"] or found["gcc"] or found["clang"]
        shown = f"<{header}>" if header else found["name"] or f"std::{found['member']}"
        of_cmath = found["member"] and implied_headers(found["member"]) == ["cmath"]
        named = "std::math" if of_cmath else shown
        hint = next((hint for pattern, hint in _HINTS.items() if re.fullmatch(pattern, named)), None)
        if hint is not None:
            package = cccl_package()
            brought = "" if has_cccl() else f", which `pip install {package}` installs"
            return f"`{shown}`: {hint.format(package=package, brought=brought)}"
    return None
