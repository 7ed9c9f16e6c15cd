"""Tables of the ONNX nodes that a library of custom operators computes, generated as C++."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opsmith.kernels.common.parameters import PARAMETER_TYPES

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
    """

    name: str
    kernels: tuple[str, ...]
    arguments: tuple[NodeArgument, ...]
    output_indices: tuple[int, ...]
    shapes: str


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


def generated_nodes(types: Sequence[NodeType]) -> str:
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
        lines.append(_array(f"const opsmith::Exported* const kernels_{number}", _addresses(operator.kernels)))
        lines.append(
            _array(f"const opsmith::NodeArgument arguments_{number}", map(_argument, operator.arguments))
        )
        lines.append(_array(f"const int32_t outputs_of_{number}", map(str, operator.output_indices)))
    lines.append(
        _array("const opsmith::NodeOperator operators", map(_operator, range(len(operators)), operators))
    )
    for number, each in enumerate(types):
        lines.append(_array(f"const int32_t inputs_{number}", map(str, each.inputs)))
        lines.append(_array(f"const bool optional_{number}", map(_flag, each.optional)))
        lines.append(_array(f"const int32_t outputs_{number}", map(str, each.outputs)))
    rows = [
        f"{{{_text(each.domain)}, {_text(each.op_type)}, &operators[{operators.index(each.operator)}], "
        f"inputs_{number}, optional_{number}, {len(each.inputs)}, outputs_{number}, "
        f"{len(each.outputs)}, "
        f"{f'sizes_{bodies.index(each.sizes)}' if each.sizes else 'nullptr'}}}"
        for number, each in enumerate(types)
    ]
    lines.append(_array("const opsmith::NodeType types", rows))
    lines.append("}  // namespace")
    lines.append(f"const opsmith::NodeLibrary opsmith_nodes = {{types, {len(types)}, used_instructions}};")
    return "\n".join(lines) + "\n"


def _operator(number: int, operator: NodeOperator) -> str:
    return (
        f"{{{_text(operator.name)}, kernels_{number}, {len(operator.kernels)}, arguments_{number}, "
        f"{len(operator.arguments)}, outputs_of_{number}, {len(operator.output_indices)}, "
        f"{_text(operator.shapes)}}}"
    )


def _argument(argument: NodeArgument) -> str:
    type = PARAMETER_TYPES.index(argument.type)
    name, bits = _text(argument.name), _text(argument.name + BITS)
    return f"{{{name}, {type}, {_flag(argument.optional)}, {bits}}}"


def _addresses(names: Iterable[str]) -> Iterable[str]:
    return (f"&{name}" for name in names)


def _array(declared: str, items: Iterable[str]) -> str:
    listed = list(items)
    # C++ has no empty arrays.
    return f"{declared}[{max(len(listed), 1)}] = {{{', '.join(listed)}}};"


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _text(value: str) -> str:
    """Return a string literal of C++, in which octal escapes have three digits."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\?' else f"\\{byte:03o}" for byte in value.encode()
    )
    return f'"{"".join(plain)}"'
