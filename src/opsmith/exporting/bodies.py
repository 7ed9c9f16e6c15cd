"""Bodies of operator nodes: ONNX functions, derived from references and shared by equal calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opsmith.core.specification import Specification
from opsmith.exporting.calls import SYMBOLIC_NODE, VERSION, OperatorCall
from opsmith.exporting.capture import traced
from opsmith.exporting.packages import InlinePass, onnx, onnx_ir
from opsmith.exporting.translation import OPERATOR, complete, operator_nodes

Translate = Callable[[Any], Any]
"""Translates a program of torch to an onnx_ir model, in which calls of our operators are nodes."""


@dataclass
class Bodies:
    """The bodies of one model: ONNX functions, each shared by all calls that compute the same.

    A body contains the values of attributes, so calls with other attributes or other dtypes may need another
    body. The first one has the operator's name, others have a number behind it. They differ in `op_type` and
    not in `overload`, since ONNX Runtime before 1.27 ignores `overload` and would run the wrong body.

    Args:
        operators: The specification of each operator, by torch's operator.
        translate: Translates a program of torch.
        functions: The bodies, by domain and name.
        inner: Nodes of our operators inside the bodies, with their calls.
    """

    operators: Mapping[Any, Specification]
    translate: Translate
    functions: dict[tuple[str, str], Any] = field(default_factory=dict)
    inner: list[tuple[Any, OperatorCall]] = field(default_factory=list)
    _names: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def attach(self, model: Any) -> None:
        """Give every node of our operators its body, and put all bodies into the model.

        Raises:
            ExportError: If a body cannot be derived.
            DynamicAxisError: If a reference fixes a symbolic size.
        """
        self._name_nodes(model)
        for function in self.functions.values():
            model.functions[function.identifier()] = function
            model.opset_imports.setdefault(function.domain, VERSION)
            function.opset_imports.update(
                {node.domain: VERSION for node in function.graph.all_nodes() if node.domain}
            )

    def _name_nodes(self, model: Any) -> None:
        """Derive the bodies of a model's nodes, and name each node after its body."""
        pairs = list(operator_nodes(model, self.operators))
        self._derive([call for _, call in pairs])
        for node, call in pairs:
            node.op_type = self._names[call.signature()]

    def _derive(self, calls: Sequence[OperatorCall]) -> None:
        new = {call.signature(): call for call in calls if call.signature() not in self._names}
        if not new:
            return
        model = self.translate(traced(list(new.values())))
        InlinePass()(model)  # functions that torch's exporter makes of branches and loops
        for node, call in operator_nodes(model, self.operators):
            complete(node, call)
            self.inner.append((node, call))
        self._name_nodes(model)
        proto = onnx_ir.to_proto(model)
        inputs, outputs = (
            iter([value.name for value in values]) for values in (proto.graph.input, proto.graph.output)
        )
        for signature, call in new.items():
            self._names[signature] = self._named(call, self._carved(proto, call, inputs, outputs))

    def _carved(self, proto: Any, call: OperatorCall, inputs: Any, outputs: Any) -> Any:
        given = {next(inputs): name for name, node in call.slots() if node is not None}
        made = [next(outputs) for _ in call.results()]
        return function_from(proto.graph, given, call.formal(), made, proto.opset_import)

    def _named(self, call: OperatorCall, function: Any) -> str:
        """The name of a body: the name of an equal body, or a new one."""
        key = (call.specification.name, *call.node_type, function.SerializeToString())
        if key not in self._known:
            domain, plain = call.node_type
            taken = {each.short_name for each in self.operators.values() if each.namespace == domain}
            count, name = 1, plain
            while (domain, name) in self.functions or (count > 1 and name in taken):
                count += 1
                name = f"{plain}_{count}"
            function.domain, function.name = domain, name
            function.metadata_props.append(
                onnx.StringStringEntryProto(key=OPERATOR, value=call.specification.name)
            )
            self.functions[domain, name] = onnx_ir.from_proto(function)
            self._known[key] = name
        return self._known[key]


def remove_bodies(model: Any) -> None:
    """Remove the bodies, and give each node the name of its operator."""
    model.functions.clear()
    for node in model.graph.all_nodes():
        name, named = node.metadata_props.get(OPERATOR), node.meta.get(SYMBOLIC_NODE)
        if name is not None:
            node.op_type = name.partition("::")[2] if named is None else named.op_type


def inline_bodies(model: Any) -> None:
    """Replace each node by the nodes of its body."""
    ours = {function.domain for function in model.functions.values()}
    InlinePass()(model)
    for domain in ours:
        model.opset_imports.pop(domain, None)


def function_from(
    graph: Any,
    inputs: Mapping[str, str],
    formal: Sequence[str],
    outputs: Sequence[str],
    opsets: Sequence[Any],
) -> Any:
    """The nodes behind some outputs of a graph, as a function without name or domain.

    Functions with the same nodes are equal byte by byte.

    Args:
        graph: A `GraphProto`.
        inputs: Name in the function, by name in the graph.
        formal: The function's inputs, in order; some may be unused.
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
    """New names for values, numbered in order of use, so that equal functions have equal names."""

    def __init__(self, given: Mapping[str, str], taken: Sequence[str]) -> None:
        super().__init__(given)
        self._taken = set(taken)
        self._count = 0

    def __missing__(self, name: str) -> str:
        self[name] = new = self.fresh()
        return new

    def fresh(self) -> str:
        """An unused name."""
        while True:
            self._count += 1
            name = f"value_{self._count}"
            if name not in self._taken:
                return name


def _constants(graph: Any) -> dict[str, Any]:
    """A Constant node for each initializer: a function has none."""
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
    """The nodes that some values are computed by, in topological order."""
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
    """Names of the values that a node reads, including those that its subgraphs read from outside."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        inner = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        inner |= {name for each in graph.node for name in each.output}
        for each in graph.node:
            yield from (name for name in _read(each) if name not in inner)
        yield from (value.name for value in graph.output if value.name not in inner)


def subgraphs(node: Any) -> Iterator[Any]:
    """The graphs in the attributes of a node: branches, and bodies of loops."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _with_inner(nodes: Sequence[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _with_inner(graph.node)


def _rename(node: Any, names: _Names) -> None:
    """Rename the values of a node and its subgraphs, and drop names and documentation."""
    for key in ("name", "doc_string", "metadata_props"):
        node.ClearField(key)
    node.input[:] = [names[name] if name else "" for name in node.input]
    node.output[:] = [names[name] if name else "" for name in node.output]
    for graph in subgraphs(node):
        graph.name = "body"
        for key in ("doc_string", "metadata_props", "value_info"):
            graph.ClearField(key)
        for value in (*graph.input, *graph.output, *graph.initializer):
            value.name = names[value.name]
            value.ClearField("metadata_props")
        for each in graph.node:
            _rename(each, names)
