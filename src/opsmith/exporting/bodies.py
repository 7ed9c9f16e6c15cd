"""Bodies for the nodes of our operators: functions of ONNX, derived from references and shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx_ir.passes.common import InlinePass

from opsmith.core.specification import Specification
from opsmith.exporting.calls import Call
from opsmith.exporting.functions import function_from
from opsmith.exporting.packages import onnx, onnx_ir
from opsmith.exporting.references import traced
from opsmith.exporting.symbolic import NAMED
from opsmith.exporting.translating import OPERATOR, VERSION, complete, our_nodes

Translate = Callable[[Any], Any]
"""From a program of torch to a model in onnx_ir's form, in which calls of our operators are nodes."""


@dataclass
class Bodies:
    """The functions of one model, by what they compute.

    A node has attributes, and its body has their values inside: so a call with others, or with tensors of
    another form, may need another body. The first one has the operator's name, others have it with a number.
    They differ in `op_type` and not in `overload`, which runtimes before ONNX Runtime 1.27 do not look at:
    they would run the wrong one without a word.

    Args:
        operators: The specification of each operator, by torch's operator.
        translate: Translates a program of torch.
        functions: By domain and name.
        inner: Nodes in the functions that call our operators, with their calls.
    """

    operators: Mapping[Any, Specification]
    translate: Translate
    functions: dict[tuple[str, str], Any] = field(default_factory=dict)
    inner: list[tuple[Any, Call]] = field(default_factory=list)
    _names: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def give(self, model: Any) -> None:
        """Give every node of our operators in a model its body, and those in bodies theirs.

        Raises:
            ExportError: If a body cannot be derived.
            DynamicAxisError: If a reference fixes a size that varies.
        """
        pairs = list(our_nodes(model, self.operators))
        self._derive([call for _, call in pairs])
        for node, call in pairs:
            node.op_type = self._names[call.signature()]

    def _derive(self, calls: Sequence[Call]) -> None:
        new = {call.signature(): call for call in calls if call.signature() not in self._names}
        if not new:
            return
        model = self.translate(traced(list(new.values())))
        InlinePass()(model)  # what torch's exporter makes of branches and loops
        for node, call in our_nodes(model, self.operators):
            complete(node, call)
            self.inner.append((node, call))
        self.give(model)
        proto = onnx_ir.to_proto(model)
        inputs, outputs = (
            iter([value.name for value in values]) for values in (proto.graph.input, proto.graph.output)
        )
        for signature, call in new.items():
            self._names[signature] = self._named(call, self._carved(proto, call, inputs, outputs))

    def _carved(self, proto: Any, call: Call, inputs: Any, outputs: Any) -> Any:
        given = {next(inputs): name for name, node in call.slots() if node is not None}
        made = [next(outputs) for _ in call.results()]
        return function_from(proto.graph, given, call.formal(), made, proto.opset_import)

    def _named(self, call: Call, function: Any) -> str:
        """The name of a function: that of an equal one, or a new one."""
        key = (call.specification.name, *call.place, function.SerializeToString())
        if key not in self._known:
            domain, plain = call.place
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

    def attach(self, model: Any) -> None:
        """Put the functions into the model that their nodes are in."""
        for function in self.functions.values():
            model.functions[function.identifier()] = function
            model.opset_imports.setdefault(function.domain, VERSION)
            function.opset_imports.update(
                {node.domain: VERSION for node in function.graph.all_nodes() if node.domain}
            )


def without_bodies(model: Any) -> None:
    """Leave the nodes alone, each under the operator's own name."""
    model.functions.clear()
    for node in model.graph.all_nodes():
        name, named = node.metadata_props.get(OPERATOR), node.meta.get(NAMED)
        if name is not None:
            node.op_type = name.partition("::")[2] if named is None else named.op_type


def inlined(model: Any) -> None:
    """Put the nodes of each body in the place of the node that calls it."""
    ours = {function.domain for function in model.functions.values()}
    InlinePass()(model)
    for domain in ours:
        model.opset_imports.pop(domain, None)
