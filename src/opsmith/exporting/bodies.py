"""Bodies of operator nodes: ONNX functions, derived from references and shared by equal calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from opsmith import errors
from opsmith.core.specification import Specification
from opsmith.exporting.calls import SYMBOLIC_NODE, VERSION, OperatorCall
from opsmith.exporting.capture import refused_by_torch, traced
from opsmith.exporting.packages import ClearMetadataAndDocStringPass, InlinePass, onnx_ir
from opsmith.exporting.translation import OPERATOR, complete, operator_nodes

Translate = Callable[[Any], Any]
"""Translates a program of torch to an onnx_ir model, in which calls of our operators are nodes."""


@dataclass
class Bodies:
    """The bodies of one model: ONNX functions, each shared by all calls with the same computation.

    A body contains the values of attributes, so calls with different attributes or dtypes may need different
    bodies. The first body has the operator's name, and the others have a number behind it. They differ in
    `op_type`, not in `overload`: ONNX Runtime before 1.27 ignores `overload` and would run the wrong body.

    Args:
        operators: The specification of each operator, by torch's operator.
        translate: Function that translates a program of torch.
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
            DynamicAxisError: If a reference makes a symbolic size constant.
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
        try:
            model = self.translate(traced(list(new.values())))
        except Exception as error:
            raise self._refusal(list(new.values()), error) from None
        InlinePass()(model)  # inline the functions that torch's exporter makes of branches and loops
        for node, call in operator_nodes(model, self.operators):
            complete(node, call)
            self.inner.append((node, call))
        self._name_nodes(model)
        ClearMetadataAndDocStringPass()(model)
        inputs, outputs = iter(model.graph.inputs), iter(model.graph.outputs)
        for signature, call in new.items():
            given = {name: next(inputs) for name, node in call.slots() if node is not None}
            made = [next(outputs) for _ in call.results()]
            self._names[signature] = self._named(call, function_from(model.graph, given, call.formal(), made))

    def _refusal(self, calls: Sequence[OperatorCall], error: Exception) -> errors.OpsmithError:
        """The error, with the operator's name, for bodies that torch's exporter refuses."""
        for call in calls:
            try:
                self.translate(traced([call]))
            except Exception as own:
                error = own
                break
        specification = call.specification
        return refused_by_torch(error, "its reference").of(specification.name, specification.where)

    def _named(self, call: OperatorCall, function: Any) -> str:
        """The name of a body: the name of an equal body, or a new one."""
        key = (call.specification.name, *call.node_type, onnx_ir.to_proto(function).SerializeToString())
        if key not in self._known:
            domain, plain = call.node_type
            taken = {each.short_name for each in self.operators.values() if each.namespace == domain}
            names = (plain if at == 1 else f"{plain}_{at}" for at in count(1))
            free = (each for each in names if (domain, each) not in self.functions)
            name = next(each for each in free if each == plain or each not in taken)
            function.domain, function.name = domain, name
            function.metadata_props[OPERATOR] = call.specification.name
            self.functions[domain, name] = function
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


def function_from(graph: Any, given: Mapping[str, Any], formal: Sequence[str], outputs: Sequence[Any]) -> Any:
    """The nodes that compute some values of a graph, as a function without name or domain.

    Functions with the same nodes are equal byte by byte: names are numbers, and types are omitted.

    Args:
        graph: An onnx_ir graph.
        given: The inputs of the graph that the nodes may use, by their name in the function.
        formal: The function's inputs, in order; some may be unused.
        outputs: The values.
    """
    made = onnx_ir.convenience.extract(graph, list(given.values()), outputs)
    inputs = dict(zip(given, made.inputs, strict=True))
    made.inputs[:] = [inputs.get(name) or onnx_ir.Value(name=name) for name in formal]
    read = [value for node in made.all_nodes() for value in node.inputs] + [*made.outputs]
    # A function has no initializers.
    for value in dict.fromkeys(each for each in read if each in made.initializers.values()):
        constant = copy(made.initializers.pop(value.name).const_value)
        constant.name = None
        made.append(node := onnx_ir.node("Constant", [], {"value": constant}))
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    for at, value in enumerate(made.outputs):
        if value in made.inputs or value in made.outputs[:at]:  # each output needs a separate node
            made.append(node := onnx_ir.node("Identity", [value]))
            made.outputs[at] = node.outputs[0]
    made.sort()
    _rename(made, formal)
    used = {"", *(node.domain for node in made.all_nodes())}
    for domain in made.opset_imports.keys() - used:
        del made.opset_imports[domain]
    return onnx_ir.Function("", "", graph=made, attributes=())


def _rename(graph: Any, formal: Sequence[str]) -> None:
    """Number the values of a graph and its subgraphs, in order, and drop other names, types and metadata."""
    values = []
    for name, value in zip(formal, graph.inputs, strict=True):
        value.name, value.type, value.shape = name, None, None
    for inner in graph.subgraphs():
        inner.name = "body"
        values += [*inner.inputs, *inner.initializers.values()]
    for node in graph.all_nodes():
        node.name = None
        values += node.outputs
        for value in node.outputs:
            if node.graph is graph or not value.is_graph_output():
                value.type = value.shape = None
    names = (name for at in count(1) if (name := f"value_{at}") not in formal)
    for value in values:
        value.metadata_props.clear()
        value.name = value.name and next(names)
