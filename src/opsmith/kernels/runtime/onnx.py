"""Library of custom operators for ONNX Runtime, without torch: write its tables, and link it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opsmith.build.cache import CacheEntry
from opsmith.kernels.cpp.kernel_object import THIS_PROCESSOR
from opsmith.kernels.cpp.literals import array, flag, text
from opsmith.kernels.runtime.library import HERE, PLANNING, PROCESSOR, RUNNING
from opsmith.kernels.runtime.linked_library import KernelObject, LinkedLibrary, table_file
from opsmith.kernels.runtime.operators import LinkedOperator

LIBRARY = "nodes.so"
_LIBRARY = LinkedLibrary(
    program="ONNX Runtime",
    name=LIBRARY,
    source=HERE / "onnx.cpp",
    headers=(HERE / "onnx.h", HERE / "onnx_api.h", *RUNNING, *PLANNING, PROCESSOR),
    exported="{ global: RegisterCustomOps; local: *; };\n",
    linking=("-Wl,--no-undefined",),
)
BITS = "_float64_bits"
"""Suffix of attributes that contain the bits of double-precision numbers, as 64-bit integers."""


@dataclass(frozen=True, slots=True)
class NodeType:
    """Type of node with one choice of element types.

    Attributes:
        domain, op_type: Name of the type.
        operator: The operator that the node calls.
        kernels: Kernels of the operator, in the order in which they are tried.
        output_indices: Output of a node for each result; -1 for a hidden result.
        inputs, outputs: ONNX's numbers of element types.
        optional: For each input, True if it may be missing.
    """

    domain: str
    op_type: str
    operator: LinkedOperator
    kernels: tuple[KernelObject, ...]
    output_indices: tuple[int, ...]
    inputs: tuple[int, ...]
    optional: tuple[bool, ...]
    outputs: tuple[int, ...]


def link_library(types: Sequence[NodeType]) -> CacheEntry:
    """Link kernels into a library that computes nodes of these types.

    Args:
        types: Types of nodes, at least one.

    Returns:
        Entry whose directory contains `LIBRARY`.

    Raises:
        ToolchainError: If there is no compiler, or linking fails.
    """
    kernels = list(dict.fromkeys(kernel for each in types for kernel in each.kernels))
    names = dict.fromkeys(each.operator.name for each in types)
    return _LIBRARY.link(names, kernels, node_tables(types, kernels), THIS_PROCESSOR)


def node_tables(types: Sequence[NodeType], kernels: Sequence[KernelObject]) -> str:
    """Return the C++ file of a library's tables.

    Args:
        types: Types of nodes, at least one.
        kernels: All kernels of these nodes.
    """
    operators = list(dict.fromkeys(each.operator for each in types))
    lines = [line for number, operator in enumerate(operators) for line in operator.tables(number)]
    rows = [operator.row(number) for number, operator in enumerate(operators)]
    lines.append(array("const opsmith::Operator operators", rows))
    rows = []
    for number, each in enumerate(types):
        tried = [f"{{&{kernel.table}, false}}" for kernel in each.kernels]
        lines += [
            array(f"const opsmith::OperatorKernel kernels_{number}", tried),
            array(f"const int32_t output_indices_{number}", map(str, each.output_indices)),
            array(f"const int32_t inputs_{number}", map(str, each.inputs)),
            array(f"const bool optional_{number}", map(flag, each.optional)),
            array(f"const int32_t outputs_{number}", map(str, each.outputs)),
        ]
        rows.append(
            f"{{{text(each.domain)}, {text(each.op_type)}, &operators[{operators.index(each.operator)}], "
            f"{{kernels_{number}, {len(tried)}}}, output_indices_{number}, inputs_{number}, "
            f"optional_{number}, {len(each.inputs)}, outputs_{number}, {len(each.outputs)}}}"
        )
    lines.append(array("const opsmith::NodeType types", rows))
    fields = f"types, {len(types)}, used_instructions, {text(BITS)}"
    return table_file("onnx.h", kernels, lines, f"const opsmith::NodeLibrary opsmith_nodes = {{{fields}}};")
