"""Library of C++ kernels for ONNX Runtime, linked through the cache, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opsmith.build.cache import CacheEntry
from opsmith.kernels.cpp.kernel_object import THIS_PROCESSOR
from opsmith.kernels.ort.nodes import NodeType, class_nodess
from opsmith.kernels.runtime.library import PROCESSOR, RECIPE
from opsmith.kernels.runtime.linked_library import GeneratedFile, KernelObject, LinkedLibrary

HERE = Path(__file__).parent
REGISTERING = HERE / "library.cpp"
LIBRARY = "nodes.so"
_LIBRARY = LinkedLibrary(
    program="ONNX Runtime",
    kind="onnx library",
    part="onnx registering",
    name=LIBRARY,
    headers=(
        *(HERE / name for name in ("ort_api.h", "nodes.h", "attributes.h", "layouts.h", "call.h")),
        PROCESSOR,
        RECIPE,
    ),
    exported="{ global: RegisterCustomOps; local: *; };\n",
    linking=("-Wl,--no-undefined",),
)


def link_library(kernels: Sequence[KernelObject], types: Sequence[NodeType]) -> CacheEntry:
    """Link kernels into a library that computes nodes of these types.

    Args:
        kernels: All kernels of the types.
        types: Types of nodes, at least one.

    Returns:
        Entry whose directory holds `LIBRARY`.

    Raises:
        ToolchainError: If there is no compiler, or it does not link.
    """
    nodes = GeneratedFile("nodes.cpp", class_nodess(types), THIS_PROCESSOR, {})
    names = dict.fromkeys(each.operator.name for each in types)
    return _LIBRARY.link(names, kernels, [nodes], [_LIBRARY.compiled(REGISTERING)])
