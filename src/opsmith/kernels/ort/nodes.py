"""Tables of the ONNX nodes that a library of custom operators computes, generated as C++."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opsmith.kernels.common.parameters import PARAMETER_TYPES
from opsmith.kernels.cpp.literals import array, flag, text

BITS = "_float64_bits"
"""Suffix of attributes that contain the bits of double-precision numbers, as 64-bit integers."""


@dataclass(frozen=True, slots=True)
class NodeArgument:
    """Argument of an operator.

    Attributes:
        name: Name of the argument and of its attribute.
        type: One of `PARAMETER_TYPES`.
        optional: True if it may be missing.
    """

    name: str
    type: str
    optional: bool


@dataclass(frozen=True, slots=True)
class NodeOperator:
    """Operator that a library computes.

    Attributes:
        name: `namespace::name`.
        kernels: Names of its kernels' tables in the library, in the order in which they are tried.
        arguments: Arguments of the operator.
        output_indices: Output of a node for each result; -1 for a hidden result.
        shapes: Text of `shapes=`; may be empty.
        sizing: Sizes of the results by it: see `sizing_of`; empty if it does not tell them.
    """

    name: str
    kernels: tuple[str, ...]
    arguments: tuple[NodeArgument, ...]
    output_indices: tuple[int, ...]
    shapes: str
    sizing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeType:
    """Type of node with one choice of element types.

    Attributes:
        domain, op_type: Name of the type.
        operator: The operator that it calls.
        inputs, outputs: ONNX's numbers of element types.
        optional: For each input, True if it may be missing.
        sizes: Body of a C++ function of `v`, the values, and `r`, the sizes of the results, which it sets
            unless a kernel computes them; may be empty.
    """

    domain: str
    op_type: str
    operator: NodeOperator
    inputs: tuple[int, ...]
    optional: tuple[bool, ...]
    outputs: tuple[int, ...]
    sizes: str = ""


def class_nodess(types: Sequence[NodeType]) -> str:
    """Return the C++ file of a library's tables.

    Args:
        types: Types of nodes, at least one.
    """
    operators = list(dict.fromkeys(each.operator for each in types))
    kernels = dict.fromkeys(kernel for each in operators for kernel in each.kernels)
    bodies = list(dict.fromkeys(each.sizes for each in types if each.sizes))
    lines = [
        '#include "nodes.h"',
        '#include "processor.h"',
        'extern "C" {',
        *(f"extern opsmith::Exported {kernel};" for kernel in kernels),
        "}",
        "namespace {",
    ]
    for number, body in enumerate(bodies):
        signature = f"sizes_{number}(const opsmith::Value* v, opsmith::Shape* r)"
        lines.append(f"opsmith::SizesStatus {signature} {{\n{body}\n}}")
    for number, operator in enumerate(operators):
        lines.append(array(f"const opsmith::Exported* const kernels_{number}", _addresses(operator.kernels)))
        lines.append(
            array(f"const opsmith::NodeArgument arguments_{number}", map(_argument, operator.arguments))
        )
        lines.append(array(f"const int32_t outputs_of_{number}", map(str, operator.output_indices)))
        lines.append(array(f"const int64_t sizing_{number}", map(str, operator.sizing)))
    lines.append(
        array("const opsmith::NodeOperator operators", map(_operator, range(len(operators)), operators))
    )
    for number, each in enumerate(types):
        lines.append(array(f"const int32_t inputs_{number}", map(str, each.inputs)))
        lines.append(array(f"const bool optional_{number}", map(flag, each.optional)))
        lines.append(array(f"const int32_t outputs_{number}", map(str, each.outputs)))
    rows = [
        f"{{{text(each.domain)}, {text(each.op_type)}, &operators[{operators.index(each.operator)}], "
        f"inputs_{number}, optional_{number}, {len(each.inputs)}, outputs_{number}, "
        f"{len(each.outputs)}, "
        f"{f'sizes_{bodies.index(each.sizes)}' if each.sizes else 'nullptr'}}}"
        for number, each in enumerate(types)
    ]
    lines.append(array("const opsmith::NodeType types", rows))
    lines.append("}  // namespace")
    lines.append(f"const opsmith::NodeLibrary opsmith_nodes = {{types, {len(types)}, used_instructions}};")
    return "\n".join(lines) + "\n"


def _operator(number: int, operator: NodeOperator) -> str:
    return (
        f"{{{text(operator.name)}, kernels_{number}, {len(operator.kernels)}, arguments_{number}, "
        f"{len(operator.arguments)}, outputs_of_{number}, {len(operator.output_indices)}, "
        f"{text(operator.shapes)}, {f'sizing_{number}' if operator.sizing else 'nullptr'}}}"
    )


def _argument(argument: NodeArgument) -> str:
    type = PARAMETER_TYPES.index(argument.type)
    name, bits = text(argument.name), text(argument.name + BITS)
    return f"{{{name}, {type}, {flag(argument.optional)}, {bits}}}"


def _addresses(names: Iterable[str]) -> Iterable[str]:
    return (f"&{name}" for name in names)
