"""From a call in torch's graph to a node of ONNX, under the operator's own name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.core.specification import Specification
from opsmith.exporting.attributes import attribute, bits
from opsmith.exporting.calls import Call, default, input_slots, refuse_lists_before_others, size_items
from opsmith.exporting.packages import onnx, onnx_ir, onnxscript
from opsmith.exporting.sizes import varies
from opsmith.exporting.symbolic import NAMED, by_symbolic, symbolic_of
from opsmith.exporting.tensors import DTYPES, ONNX_TYPES, TYPE_NAMES

VERSION = 1
"""Of the domains that our nodes are in."""

KEY = "opsmith_key"
"""An attribute that a node has until it has its own: the exporter makes one of nodes that are alike."""

OPERATOR = "opsmith.operator"
"""Key, in the metadata of a node, of the operator that it calls."""


class Outputs(Sequence[Any]):
    """The outputs of a node that are a list of tensors, its last: there are as many as anyone asks for.

    The exporter translates a call before it has told how many results it has; `complete` cuts them to size.

    Args:
        first: The first of them.
        alone: Whether there are no others. The exporter then goes over them twice: first beside the results
            of torch's call, of which it tells each the type and shape, and there are as many as of these;
            then it names those that are there.
    """

    def __init__(self, first: Any, *, alone: bool) -> None:
        self._node = first.producer()
        self._start: int = first.index()
        self._open = alone

    def __getitem__(self, at: Any) -> Any:
        if self._start + at >= len(self._node.outputs):
            self._node.resize_outputs(self._start + at + 1)
        return self._node.outputs[self._start + at]

    def __len__(self) -> int:
        return len(self._node.outputs) - self._start

    def __iter__(self) -> Iterator[Any]:
        if not self._open:
            return iter(tuple(self._node.outputs[self._start :]))
        self._open = False
        return map(self.__getitem__, itertools.count())


class Results(Sequence[Any]):
    """Results of which the last is a list; whoever goes over them, to name them, meets the others.

    Args:
        single: Those before the list.
        rest: The list.
    """

    def __init__(self, single: Sequence[Any], rest: Outputs) -> None:
        self._single, self._rest = single, rest

    def __getitem__(self, at: Any) -> Any:
        return self._rest if at == len(self._single) else self._single[at]

    def __len__(self) -> int:
        return len(self._single)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._single)


def translations(
    operators: Sequence[Operator[Any, Any]], opset: int, notes: list[str]
) -> dict[Any, Callable[..., Any]]:
    """What torch's exporter is told of our operators: for each, a function that makes its node.

    Args:
        operators: All that a model may call.
        opset: Version of ONNX's operators.
        notes: Takes up what authors should know of their `symbolic`, while the exporter is made to be silent.
    """
    return {
        each.torch_operator: _translation(each.specification)
        if symbolic_of(each.specification) is None
        else _by_class(each.specification, opset, notes)
        for each in operators
    }


def _by_class(specification: Specification, opset: int, notes: list[str]) -> Callable[..., Any]:
    leaves, adopted = specification.schema.leaves, specification.adopted

    def translate(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip((leaf.name for leaf in leaves), args, strict=False)), **kwargs}
        pairs = [(leaf, given.get(leaf.name, default(leaf))) for leaf in leaves]
        values = [value for _, value in pairs]
        if adopted is not None and adopted.variadic:
            values[-1:] = values[-1] or ()
        tensors = [value for _, value in input_slots(pairs)]
        return by_symbolic(specification, values, tensors, opset, notes)

    return translate


def _translation(specification: Specification) -> Callable[..., Any]:
    leaves = specification.schema.leaves
    shown = [result for result in specification.schema.results if not result.hidden]
    numbers = itertools.count()

    def translate(*args: Any, **kwargs: Any) -> Any:
        refuse_lists_before_others(specification)
        given = {**dict(zip((leaf.name for leaf in leaves), args, strict=False)), **kwargs}
        inputs = [value for _, value in input_slots([(leaf, given.get(leaf.name)) for leaf in leaves])]
        plain = [(leaf.name, given.get(leaf.name)) for leaf in leaves if not leaf.kind.is_tensor]
        key = next(numbers) if specification.random else plain
        made = _node(specification, inputs, len(shown), repr(key))
        if not shown[-1].sequence:
            return made
        if len(shown) == 1:
            return Outputs(made, alone=True)
        return Results(made[:-1], Outputs(made[-1], alone=False))

    return translate


def _node(specification: Specification, inputs: Sequence[Any], outputs: int, key: str) -> Any:
    """Have the exporter record a node; what it cannot know yet is filled in by `complete`."""
    schema = onnx.defs.OpSchema
    optional = schema.FormalParameterOption.Optional
    letters = [f"T{at}" for at in range(len(inputs) + outputs)]
    described = schema(
        specification.short_name,
        specification.namespace,
        VERSION,
        inputs=[
            schema.FormalParameter(f"input{at}", letters[at], param_option=optional)
            for at in range(len(inputs))
        ],
        outputs=[schema.FormalParameter(f"output{at}", letters[len(inputs) + at]) for at in range(outputs)],
        type_constraints=[(letter, sorted(DTYPES), "any tensor") for letter in letters],
        attributes=[schema.Attribute(KEY, schema.AttrType.STRING, required=True)],
    )
    opset = onnxscript.values.Opset(specification.namespace, VERSION)
    return onnxscript.values.Op(opset, specification.short_name, described)(*inputs, **{KEY: key})


def our_nodes(model: Any, operators: Mapping[Any, Specification]) -> Iterator[tuple[Any, Call]]:
    """The nodes of a translated model that call our operators, each with its call, functions among them.

    Args:
        model: In onnx_ir's form.
        operators: The specification of each, by torch's operator.
    """
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    for graph in graphs:
        for node in list(graph.all_nodes()):
            call = node.meta.get("node")
            if call is not None and call.target in operators and node.domain:
                yield node, Call(operators[call.target], call, node.meta.get(NAMED))


def complete(node: Any, call: Call) -> None:
    """Give a node what the exporter could not: its attributes, and as many outputs as the call has.

    Raises:
        ExportError: If a value cannot be an attribute.
    """
    specification = call.specification
    if call.named is None:
        del node.attributes[KEY]
        _describe(node, call)
    results = call.results()
    if not results:
        raise errors.ExportError(
            "it returns no tensor in this call",
            operator=specification.name,
            where=specification.where,
            hint="leave the call out of the model",
        )
    node.resize_outputs(len(results))
    for at, (output, result) in enumerate(zip(node.outputs, results, strict=True)):
        # a node may leave out the last outputs of its function, which onnx's shape inference cannot read
        output.name = output.name or f"{node.name}__{at}"
        output.type = onnx_ir.TensorType(onnx_ir.DataType(_onnx_type(specification, result.dtype)))
        output.shape = onnx_ir.Shape([str(size) if varies(size) else int(size) for size in result.shape])
    node.metadata_props[OPERATOR] = specification.name


def _describe(node: Any, call: Call) -> None:
    wide = torch.float64 in call.dtypes()
    for leaf, value in call.values():
        if leaf.kind.is_tensor:
            if leaf.kind.sequence and value is not None:
                made = onnx_ir.AttrInt64(f"{leaf.name}_count", len(value))
                node.attributes[made.name] = made
            continue
        if size_items(value):
            continue
        written = attribute(call.specification, leaf, value)
        if written is not None:
            node.attributes[leaf.name] = written
            exact = bits(leaf, value) if wide else None
            if exact is not None:
                node.attributes[exact.name] = exact


def _onnx_type(specification: Specification, dtype: Any) -> int:
    if dtype not in ONNX_TYPES:
        raise errors.ExportError(
            "ONNX has no tensors of the type that it returns",
            operator=specification.name,
            expected=TYPE_NAMES,
            got=str(dtype),
            where=specification.where,
            hint="return another type; of complex numbers, `torch.view_as_real`",
        )
    return ONNX_TYPES[dtype]
