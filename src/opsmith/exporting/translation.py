"""Translate calls of operators to ONNX nodes: domain, type, attributes and outputs."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.core.argument_types import OBJECT
from opsmith.core.operator import Operator
from opsmith.core.origins.function_class import class_of
from opsmith.core.schema import Argument
from opsmith.core.specification import Specification
from opsmith.exporting.calls import (
    SYMBOLIC_NODE,
    OperatorCall,
    add_node,
    attribute_of,
    default,
    input_slots,
    refuse_lists_before_others,
    size_items,
    symbolic_of,
    varies,
)
from opsmith.exporting.dtypes import ONNX_TYPES, TYPE_NAMES
from opsmith.exporting.packages import onnx, onnx_ir, onnxscript
from opsmith.exporting.symbolic import by_symbolic
from opsmith.kernels.runtime.onnx import BITS

KEY = "opsmith_key"
"""Temporary attribute, which differs between calls so that the exporter does not merge their nodes."""

OPERATOR = "opsmith.operator"
"""Key of the operator's name in the metadata of a node."""


class ListOutputs(Sequence[Any]):
    """The last outputs of a node, which are a list of tensors; each read makes a missing output.

    The exporter translates a call before the number of its results is known. `complete` corrects the number.

    Args:
        first: The first output of the list.
        alone: True if the node has no outputs before the list. The exporter then iterates twice. The first
            time it sets types and shapes, in parallel with the results of torch's call, so this iteration
            must not end. The second time it names the existing outputs.
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


class MixedResults(Sequence[Any]):
    """Results that end in a list. The exporter iterates over them to name them; the iteration omits the list.

    Args:
        single: The results before the list.
        rest: The list.
    """

    def __init__(self, single: Sequence[Any], rest: ListOutputs) -> None:
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
    """A function for each operator, with which torch's exporter makes the operator's node.

    Args:
        operators: All operators that a model may call.
        opset: Version of ONNX's operators.
        notes: List that gets warnings about a `symbolic`, since warnings are off while the exporter runs.
    """
    return {each.torch_operator: _translation(each.specification, opset, notes) for each in operators}


def _translation(specification: Specification, opset: int, notes: list[str]) -> Callable[..., Any]:
    leaves, symbolic = specification.schema.leaves, symbolic_of(specification)
    shown = [result for result in specification.schema.results if not result.hidden]
    numbers = itertools.count()

    def translate(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip((leaf.name for leaf in leaves), args, strict=False)), **kwargs}
        pairs = [(leaf, given.get(leaf.name, default(leaf))) for leaf in leaves]
        inputs = [value for _, value in input_slots(pairs)]
        if symbolic is not None:
            adopted, values = class_of(specification.origin), [value for _, value in pairs]
            if not adopted.parameters.plain:
                kinds = [argument.kind for argument in adopted.schema.arguments]
                absent = [value is None and kind.sequence for value, kind in zip(values, kinds, strict=True)]
                values = adopted.spread(
                    [[] if no else value for no, value in zip(absent, values, strict=True)]
                )
            return by_symbolic(specification, values, inputs, opset, notes)
        refuse_lists_before_others(specification)
        plain = [(leaf.name, value) for leaf, value in pairs if not leaf.kind.is_tensor]
        key = repr(next(numbers) if specification.random else plain)
        # `complete` adds its attributes and the number of its outputs.
        domain, op_type = specification.namespace, specification.short_name
        made = add_node(domain, op_type, inputs, len(shown), {KEY: ("STRING", key)})
        if not shown[-1].sequence:
            return made
        if len(shown) == 1:
            return ListOutputs(made, alone=True)
        return MixedResults(made[:-1], ListOutputs(made[-1], alone=False))

    return translate


def operator_nodes(model: Any, operators: Mapping[Any, Specification]) -> Iterator[tuple[Any, OperatorCall]]:
    """The nodes that call our operators in a translated model and its functions, each with its call.

    Args:
        model: The onnx_ir model.
        operators: The specification of each operator, by torch's operator.
    """
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    for graph in graphs:
        for node in list(graph.all_nodes()):
            call = node.meta.get("node")
            if call is not None and call.target in operators and node.domain:
                yield node, OperatorCall(operators[call.target], call, node.meta.get(SYMBOLIC_NODE))


def complete(node: Any, call: OperatorCall) -> None:
    """Add the attributes to a node, and give it as many typed outputs as the call has results.

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
        # onnx's shape inference cannot read a node with fewer outputs than its function
        output.name = output.name or f"{node.name}__{at}"
        output.type = onnx_ir.TensorType(onnx_ir.DataType(_onnx_type(specification, result.dtype)))
        output.shape = onnx_ir.Shape([str(size) if varies(size) else int(size) for size in result.shape])
    node.metadata_props[OPERATOR] = specification.name


def _describe(node: Any, call: OperatorCall) -> None:
    double = torch.float64 in call.dtypes()
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
            exact = bits(leaf, value) if double else None
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
            hint="return a different type; for complex numbers, return `torch.view_as_real(y)`",
        )
    return ONNX_TYPES[dtype]


def exact_scalars(opset: int) -> dict[Any, Callable[..., Any]]:
    """A translation of `scalar_tensor` that keeps float64, which torch's own rounds to single precision.

    In `0.3 * x`, `scalar_tensor` makes the number.
    """
    from onnxscript.function_libs.torch_lib.ops import core  # this imports a thousand translations

    operators = onnxscript.values.Opset("", opset)

    def scalar_tensor(s: Any, **options: Any) -> Any:
        if isinstance(s, float) and options.get("dtype") == onnx.TensorProto.DOUBLE:
            return operators.Constant(value=onnx.helper.make_tensor("", onnx.TensorProto.DOUBLE, [], [s]))
        return core.aten_scalar_tensor(s, **options)

    return {torch.ops.aten.scalar_tensor.default: scalar_tensor}


INTS, FLOATS, STRINGS = "INT", "FLOAT", "STRING"

FORMS = {"SymInt": INTS, "int": INTS, "bool": INTS, "float": FLOATS, "str": STRINGS, "complex": FLOATS}
"""Type of an attribute by the argument's type in torch's schema; any other type becomes a string."""


def attribute(specification: Specification, leaf: Argument, value: Any) -> Any:
    """The attribute for the value of an argument; None if the value is None or a Python object.

    A single number for a pair is written twice, a complex number as two parts. `FLOAT` has single precision,
    and the body contains the exact value.

    Raises:
        ExportError: If the value depends on a dynamic axis.
    """
    kind = leaf.kind
    if value is None or kind.base is OBJECT:
        return None
    items = value if isinstance(value, list | tuple) else [value]
    if kind.spread and not isinstance(value, list | tuple):
        items = [value] * (kind.length or 1)
    if any(isinstance(item, torch.fx.Node | torch.SymInt | torch.SymFloat | torch.SymBool) for item in items):
        raise errors.ExportError(
            "a non-tensor argument depends on a dynamic axis, but an attribute is constant",
            operator=specification.name,
            argument=leaf.name,
            expected=f"{kind.annotation()} that is the same in every call",
            got=", ".join(map(str, items)),
            where=specification.where,
            hint="let the reference read the number from a tensor's shape, or leave the axis out of "
            "`dynamic=`",
        )
    form = FORMS.get(kind.base.schema, STRINGS)
    if kind.base.schema == "Scalar":
        form = INTS if isinstance(value, int) else FLOATS
    if form == STRINGS:
        items = [item if isinstance(item, str) else str(item).removeprefix("torch.") for item in items]
    parts = [(each.real, each.imag) if isinstance(each, complex) else (each,) for each in items]
    flat = [part for each in parts for part in each]
    return attribute_of(leaf.name, form, flat, several=kind.sequence or kind.base.schema == "complex")


def bits(leaf: Argument, value: Any) -> Any:
    """An attribute with the exact bits of floats, if single precision changes a float; else None.

    Each float is stored as the integer with the same 64 bits.
    """
    if value is None or leaf.kind.base.schema != "float":
        return None
    items = value if isinstance(value, list | tuple) else [value]
    integers = struct.unpack(f"<{len(items)}q", struct.pack(f"<{len(items)}d", *items))
    single = torch.tensor([float(item) for item in items], dtype=torch.float64)
    if torch.allclose(single.float().double(), single, rtol=0.0, atol=0.0, equal_nan=True):
        return None
    made = onnx_ir.AttrInt64s if leaf.kind.sequence else onnx_ir.AttrInt64
    return made(leaf.name + BITS, integers if leaf.kind.sequence else integers[0])
