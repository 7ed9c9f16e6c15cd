"""Library of kernels for torch's dispatcher, linked through the cache, without Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opsmith.build.cache import CacheEntry
from opsmith.kernels.cpp.compiler import STUB
from opsmith.kernels.cpp.kernel_object import flags_for
from opsmith.kernels.runtime.library import CALLING, PROCESSOR, RECIPE
from opsmith.kernels.runtime.linked_library import ANY_PROCESSOR, GeneratedFile, KernelObject, LinkedLibrary
from opsmith.kernels.serving.cuda_tables import IMAGES, ServedCuda, cuda_tables
from opsmith.kernels.serving.tables import ServedOperator, served_tables

HERE = Path(__file__).parent
REGISTERING, CALLING_CUDA = HERE / "library.cpp", HERE / "cuda.cpp"
LIBRARY = "served.so"
_AS_PYTHON = (*ANY_PROCESSOR, "-ffp-contract=off")
"""Flags for launch expressions: a multiplication and an addition round twice."""
_LIBRARY = LinkedLibrary(
    program="torch",
    kind="torch library",
    part="torch library part",
    name=LIBRARY,
    headers=(
        *(HERE / name for name in ("call.h", "tables.h", "expression.h", "cuda_tables.h", "cuda_driver.h")),
        *CALLING,
        PROCESSOR,
        RECIPE,
    ),
    exported="{ local: *; };\n",
    # Torch holds the kernels as long as the process.
    linking=("-Wl,-z,nodelete", "-Wl,--no-as-needed"),
    stubs=(STUB,),
)


def link_library(
    kernels: Sequence[KernelObject],
    operators: Sequence[ServedOperator],
    processor: str = "native",
    cuda: Sequence[ServedCuda] = (),
) -> CacheEntry:
    """Link kernels into a library that gives operators to torch's dispatcher.

    Args:
        kernels: All kernels in C++ of the operators.
        operators: The operators, at least one.
        processor: The one that the kernels were compiled for.
        cuda: CUDA kernels of operators.

    Returns:
        Entry whose directory holds `LIBRARY`.

    Raises:
        ToolchainError: If there is no compiler, or it does not link.
    """
    generated = [GeneratedFile("tables.cpp", served_tables(operators), flags_for(processor), {})]
    compiled = [_LIBRARY.compiled(REGISTERING)]
    if cuda:
        text, images = cuda_tables(cuda)
        generated.append(GeneratedFile("cuda_tables.cpp", text, _AS_PYTHON, {IMAGES: images}))
        compiled.append(_LIBRARY.compiled(CALLING_CUDA))
    names = [each.name for each in operators]
    return _LIBRARY.link(names, kernels, generated, compiled)
