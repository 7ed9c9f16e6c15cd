"""The C++ file of a library for ONNX Runtime: which nodes there are, and which kernels compute them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opsmith.build.parameter import FORMS

BITS = "_float64_bits"
"""Ending of the name of an attribute that has numbers in double precision, as whole numbers of 64 bits."""


@dataclass(frozen=True, slots=True)
class NodeArgument:
    """An argument of an operator.

    Attributes:
        name: Its name; an attribute has the same.
        form: One of `FORMS`.
        optional: Whether it may be left out.
    """

    name: str
    form: str
    optional: bool


@dataclass(frozen=True, slots=True)
class NodeOperator:
    """An operator that a library computes.

    Attributes:
        name: `namespace::name`.
        kernels: Names in the library of the tables of its kernels, in the order in which they are tried.
        arguments: Its arguments.
        places: For each result, hidden ones too, which output of a node it is; -1 for none.
        shapes: What `shapes=` says; empty where it says nothing.
    """

    name: str
    kernels: tuple[str, ...]
    arguments: tuple[NodeArgument, ...]
    places: tuple[int, ...]
    shapes: str


@dataclass(frozen=True, slots=True)
class NodeType:
    """A type of node with one choice of element types.

    Attributes:
        domain, op_type: Its name.
        operator: What it calls.
        inputs, outputs: ONNX's numbers of element types.
        optional: For each input whether it may be left out.
        sizes: The body of a function in C++ of `v`, the values, and `r`, the sizes of the results, which it
            tells where a kernel does not; empty where there is none.
    """

    domain: str
    op_type: str
    operator: NodeOperator
    inputs: tuple[int, ...]
    optional: tuple[bool, ...]
    outputs: tuple[int, ...]
    sizes: str = ""


def generated_nodes(types: Sequence[NodeType]) -> str:
    """The whole file.

    Args:
        types: At least one.
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
        lines.append(f"opsmith::Told {signature} {{\n{body}\n}}")
    for number, operator in enumerate(operators):
        lines.append(_array(f"const opsmith::Exported* const kernels_{number}", _addresses(operator.kernels)))
        lines.append(
            _array(f"const opsmith::NodeArgument arguments_{number}", map(_argument, operator.arguments))
        )
        lines.append(_array(f"const int32_t places_{number}", map(str, operator.places)))
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
        f"{len(operator.arguments)}, places_{number}, {len(operator.places)}, {_text(operator.shapes)}}}"
    )


def _argument(argument: NodeArgument) -> str:
    form = FORMS.index(argument.form)
    name, bits = _text(argument.name), _text(argument.name + BITS)
    return f"{{{name}, {form}, {_flag(argument.optional)}, {bits}}}"


def _addresses(names: Iterable[str]) -> Iterable[str]:
    return (f"&{name}" for name in names)


def _array(declared: str, items: Iterable[str]) -> str:
    listed = list(items)
    # C++ has no arrays without elements.
    return f"{declared}[{max(len(listed), 1)}] = {{{', '.join(listed)}}};"


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _text(value: str) -> str:
    """A text as a literal of C++; escapes of three digits end by themselves."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\?' else f"\\{byte:03o}" for byte in value.encode()
    )
    return f'"{"".join(plain)}"'
