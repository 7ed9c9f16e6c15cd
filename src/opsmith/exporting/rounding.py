"""What rounds in a translated model: how many nodes, and to which type at the coarsest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith.exporting.tensors import BY_NUMBER


@dataclass(frozen=True)
class Rounding:
    """What rounds.

    Args:
        nodes: How many nodes compute something when a model runs, those of bodies in every call.
        coarsest: By the name of a value, the coarsest floating type that it, or what it comes from, was
            rounded to by a node; what no node has computed is not there.
    """

    nodes: int
    coarsest: Mapping[str, torch.dtype]


def rounding(model: Any) -> Rounding:
    """What rounds in a model in onnx_ir's form, with the functions of its nodes."""
    functions = {function.identifier(): function for function in model.functions.values()}
    sizes = {name: len(function.graph) for name, function in functions.items()}
    found: dict[str, torch.dtype] = {}
    for node in model.graph:
        inside = [value for each in _inside(node) for value in each.outputs]
        before = [found[value.name] for value in node.inputs if value is not None and value.name in found]
        before += [dtype for value in inside if (dtype := _floating(value.dtype)) is not None]
        before += _in_body(node, functions)
        for value in node.outputs:
            own = _floating(value.dtype)
            types = before if own is None else [*before, own]
            if types:
                found[value.name] = max(types, key=lambda dtype: torch.finfo(dtype).eps)
    return Rounding(sum(sizes.get(node.op_identifier(), 1) for node in model.graph), found)


def _inside(node: Any) -> list[Any]:
    """The nodes of the graphs that a node has for branches and loops."""
    graphs = [graph for attribute in node.attributes.values() for graph in _graphs(attribute)]
    return [each for graph in graphs for each in graph.all_nodes()]


def _graphs(attribute: Any) -> Sequence[Any]:
    if attribute.is_ref():
        return ()
    if attribute.type.name == "GRAPH":
        return (attribute.value,)
    return tuple(attribute.value) if attribute.type.name == "GRAPHS" else ()


def _in_body(node: Any, functions: Mapping[Any, Any]) -> list[torch.dtype]:
    """The floating types that the body of a node computes in, as far as its inputs and casts tell.

    The values in a function have no types of their own.
    """
    function = functions.get(node.op_identifier())
    if function is None:
        return []
    found = [
        _floating(given.dtype)
        for given, formal in zip(node.inputs, function.inputs, strict=False)
        if given is not None and not all(map(_is_cast, formal.consumers()))
    ]
    for each in function.graph.all_nodes():
        if _is_cast(each):
            found.append(_floating(each.attributes["to"].value))
        found += _in_body(each, functions)
    return [dtype for dtype in found if dtype is not None]


def _is_cast(node: Any) -> bool:
    return node.op_type == "Cast" and not node.domain


def _floating(number: Any) -> torch.dtype | None:
    dtype = None if number is None else BY_NUMBER.get(int(number))
    return dtype if dtype is not None and dtype.is_floating_point else None
