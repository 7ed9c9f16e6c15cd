"""Functions of ONNX, carved out of a translated graph: the nodes behind some outputs, from some inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opsmith.exporting.packages import onnx


def function_from(
    graph: Any,
    inputs: Mapping[str, str],
    formal: Sequence[str],
    outputs: Sequence[str],
    opsets: Sequence[Any],
) -> Any:
    """A function without name or domain; two with the same nodes are equal byte by byte.

    Args:
        graph: A `GraphProto`.
        inputs: Name in the function, by name in the graph.
        formal: The function's inputs, in order; some may be in no node.
        outputs: Names in the graph.
        opsets: Versions of operators that the graph uses.
    """
    nodes = _constants(graph) | {output: node for node in graph.node for output in node.output if output}
    wanted = _behind(outputs, nodes, set(inputs))
    names = _Names(inputs, formal)
    made = []
    for node in wanted:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        _rename(copy, names)
        made.append(copy)
    results: list[str] = []
    for name in outputs:
        result = names[name]
        if name in inputs or result in results:  # an output of its own needs a node of its own
            result = names.fresh()
            made.append(onnx.helper.make_node("Identity", [names[name]], [result]))
        results.append(result)
    used = {node.domain for node in _with_inner(made)} | {""}
    imports = [onnx.helper.make_opsetid(each.domain, each.version) for each in opsets if each.domain in used]
    return onnx.helper.make_function("", "", list(formal), results, made, imports)


class _Names(dict[str, str]):
    """New names for values, numbered as they come: what a graph calls them says nothing about a function."""

    def __init__(self, given: Mapping[str, str], taken: Sequence[str]) -> None:
        super().__init__(given)
        self._taken = set(taken)
        self._count = 0

    def __missing__(self, name: str) -> str:
        self[name] = new = self.fresh()
        return new

    def fresh(self) -> str:
        """A name that nothing has."""
        while True:
            self._count += 1
            name = f"value_{self._count}"
            if name not in self._taken:
                return name


def _constants(graph: Any) -> dict[str, Any]:
    """A node for each tensor that the graph holds: a function has nodes alone."""
    found = {}
    for tensor in graph.initializer:
        value = onnx.TensorProto()
        value.CopyFrom(tensor)
        value.ClearField("name")
        value.ClearField("metadata_props")
        value.ClearField("doc_string")
        found[tensor.name] = onnx.helper.make_node("Constant", [], [tensor.name], value=value)
    return found


def _behind(outputs: Sequence[str], nodes: Mapping[str, Any], given: set[str]) -> list[Any]:
    """The nodes that some values come from, each behind those that it needs."""
    found: list[Any] = []
    done: set[int] = set()
    waiting = [(name, False) for name in reversed(outputs)]
    while waiting:
        name, ready = waiting.pop()
        if name in given or name not in nodes:
            continue
        node = nodes[name]
        if id(node) in done:
            continue
        if ready:
            done.add(id(node))
            found.append(node)
            continue
        waiting.append((name, True))
        waiting += [(each, False) for each in reversed(list(_read(node)))]
    return found


def _read(node: Any) -> Iterator[str]:
    """Names that a node reads, in its graphs those from outside too."""
    yield from (name for name in node.input if name)
    for graph in _graphs(node):
        inner = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        inner |= {name for each in graph.node for name in each.output}
        for each in graph.node:
            yield from (name for name in _read(each) if name not in inner)
        yield from (value.name for value in graph.output if value.name not in inner)


def _graphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _with_inner(nodes: Sequence[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        for graph in _graphs(node):
            yield from _with_inner(graph.node)


def _rename(node: Any, names: _Names) -> None:
    """Rename what a node reads and makes, in its graphs too, and drop what only people read."""
    for field in ("name", "doc_string", "metadata_props"):
        node.ClearField(field)
    node.input[:] = [names[name] if name else "" for name in node.input]
    node.output[:] = [names[name] if name else "" for name in node.output]
    for graph in _graphs(node):
        graph.name = "body"
        for field in ("doc_string", "metadata_props", "value_info"):
            graph.ClearField(field)
        for value in (*graph.input, *graph.output, *graph.initializer):
            value.name = names[value.name]
            value.ClearField("metadata_props")
        for each in graph.node:
            _rename(each, names)
