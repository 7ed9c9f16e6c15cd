"""Which code in C++ an operator may run."""

from __future__ import annotations

from opsmith.build.cpp.source import CppSource
from opsmith.core.specification import Specification
from opsmith.kernels.cpp import CppKernel


def kernels_in_cpp(specification: Specification) -> tuple[CppSource, ...]:
    """The sources of an operator's kernels in C++."""
    return tuple(
        each.function.source for each in specification.kernels if isinstance(each.function, CppKernel)
    )
