"""Digest of an operator: what its author wrote. By it libraries and Python find out if they agree."""

from __future__ import annotations

import hashlib
import json

from opsmith.build.source_text import includes_of
from opsmith.core.specification import Specification
from opsmith.kernels.cpp.kernel import CppKernel


def cpp_kernels(specification: Specification) -> list[CppKernel]:
    """Return the kernels in C++ of an operator, in the order in which they are tried."""
    return [each.function for each in specification.kernels if isinstance(each.function, CppKernel)]


def operator_digest(specification: Specification) -> str:
    """Return the digest of an operator's schema and of its kernels in C++, with their headers.

    It has no part of what opsmith generates, so that another release of opsmith makes no other operator.
    """
    parts = [
        specification.schema.void.text(specification.name, with_hidden=True),
        "" if specification.shapes is None else specification.shapes.text,
        *(_of_kernel(each) for each in cpp_kernels(specification)),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _of_kernel(kernel: CppKernel) -> list[object]:
    source = kernel.source
    headers = sorted(includes_of(source.text, source.folder).values())
    return [source.text, headers, source.entry, list(map(str, kernel.dtypes or ())), kernel.copies_back]
