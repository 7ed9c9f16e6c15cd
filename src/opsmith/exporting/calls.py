"""Calls of operators in an exported program: tensor inputs in order, other arguments, results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.core.schema import REQUIRED, Argument
from opsmith.core.specification import Specification
from opsmith.core.tensors import nested_tensors
from opsmith.exporting.dtypes import DTYPES
from opsmith.exporting.packages import onnx, onnx_ir, onnxscript

SYMBOLIC_NODE = "opsmith_named"
"""Key of the `SymbolicNode` in the `meta` of an onnx_ir node."""

VERSION = 1
"""Version of the domains of our nodes."""


@dataclass(frozen=True)
class SymbolicNode:
    """A node outside of ONNX's own domain, made by `symbolic`.

    Args:
        domain, op_type: The type of the node.
        inputs: For each input its position among the tensors of the call; None for an omitted one.
        attributes: The attributes of the node as text, by which calls are distinguished.
    """

    domain: str
    op_type: str
    inputs: tuple[int | None, ...]
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator in torch's graph.

    Args:
        specification: The specification of the operator.
        node: The node of torch's graph.
        named: The node that the `symbolic` of the operator's class made; None if there is no `symbolic`.
    """

    specification: Specification
    node: torch.fx.Node
    named: SymbolicNode | None = None

    @property
    def node_type(self) -> tuple[str, str]:
        """Domain and type of the ONNX node of the call."""
        if self.named is not None:
            return self.named.domain, self.named.op_type
        return self.specification.namespace, self.specification.short_name

    def formal(self) -> list[str]:
        """Names of the inputs of the ONNX node, up to the last input that is given."""
        slots = self.slots()
        if self.named is not None:
            return [
                f"left_out_{at}" if slot is None else slots[slot][0]
                for at, slot in enumerate(self.named.inputs)
            ]
        last = max((at for at, (_, node) in enumerate(slots) if node is not None), default=-1)
        return [name for name, _ in slots[: last + 1]]

    def values(self) -> Iterator[tuple[Argument, Any]]:
        """Each argument of torch's schema with its value: for a tensor, the graph node that computes it."""
        for at, leaf in enumerate(self.specification.schema.leaves):
            if at < len(self.node.args):
                yield leaf, self.node.args[at]
            elif leaf.name in self.node.kwargs:
                yield leaf, self.node.kwargs[leaf.name]
            else:
                yield leaf, default(leaf)

    def slots(self) -> list[tuple[str, torch.fx.Node | None]]:
        """The inputs of the ONNX node: name and graph node; None for an omitted optional input."""
        return list(input_slots(list(self.values())))

    def inputs(self) -> list[torch.Tensor | torch.SymInt]:
        """The inputs that are given, as fake values: tensors, then sizes."""
        return [node.meta["val"] for _, node in self.slots() if node is not None]

    def results(self) -> list[torch.Tensor]:
        """The results that are tensors, as fake values, with lists flattened."""
        return list(nested_tensors(self.node.meta["val"]))

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the tensor inputs and results."""
        return {each.dtype for each in (*self.inputs(), *self.results()) if isinstance(each, torch.Tensor)}

    def signature(self) -> tuple[Any, ...]:
        """The key of the call's body: sizes, positions of symbolic sizes, dtypes, other arguments."""
        described = [
            (leaf.name, _described(value) if leaf.kind.is_tensor or size_items(value) else repr(value))
            for leaf, value in self.values()
        ]
        return (self.specification.name, self.named, *described)


def default(leaf: Argument) -> Any:
    """The default of an argument in the form of torch's schema."""
    return None if leaf.default is REQUIRED else leaf.kind.lower(leaf.default)[0]


def input_slots(values: Sequence[tuple[Argument, Any]]) -> Iterator[tuple[str, Any]]:
    """The inputs of an ONNX node, from the values of a call; each tensor of a list is an input.

    Integers that are computed from dynamic axes cannot be attributes. They are inputs after all tensors.
    """
    for leaf, value in values:
        if not leaf.kind.is_tensor:
            continue
        if not leaf.kind.sequence:
            yield leaf.name, value
            continue
        for at, item in enumerate(value or ()):
            yield f"{leaf.name}_{at}", item
    for leaf, value in values:
        if not leaf.kind.is_tensor:
            several = isinstance(value, list | tuple)
            for at, item in size_items(value).items():
                yield f"{leaf.name}_{at}" if several else leaf.name, item


def size_items(value: Any) -> dict[int, Any]:
    """The integers of an argument that the graph computes, by position."""
    items = value if isinstance(value, list | tuple) else [value]
    return {at: item for at, item in enumerate(items) if _is_size(item)}


def _is_size(item: Any) -> bool:
    if isinstance(item, torch.fx.Node):
        return isinstance(item.meta.get("val"), torch.SymInt)
    return isinstance(item, onnx_ir.Value)


def _described(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_described(each) for each in value)
    if not isinstance(value, torch.fx.Node):
        return repr(value)
    if isinstance(value.meta["val"], torch.SymInt):
        return "size", example_size(value.meta["val"])
    tensor = value.meta["val"]
    open_axes = tuple(map(varies, tensor.shape))
    return str(tensor.dtype), example_shape(tensor), open_axes, str(tensor.device)


def refuse_lists_before_others(specification: Specification) -> None:
    """Refuse an operator that returns a list before another result: a node's outputs have only positions.

    Raises:
        ExportError: If it returns such a list.
    """
    shown: Sequence[Any] = [each for each in specification.schema.results if not each.hidden]
    if any(result.sequence for result in shown[:-1]):
        raise errors.ExportError(
            "it returns a list before another result, and a node of ONNX does not record where the list ends",
            operator=specification.name,
            expected="tensors; the last result may be a list of tensors",
            got=", ".join(f"{result.name}: {result.annotation()}" for result in shown),
            where=specification.where,
            hint="return the list last, or its tensors one by one",
        )


def symbolic_of(specification: Specification) -> Callable[..., Any] | None:
    """The `symbolic` of the class that an operator was adopted from, if it has one."""
    own = specification.origin.own("onnx")
    return own.function if own else None


def add_node(
    domain: str, op_type: str, inputs: Sequence[Any], outputs: int, attributes: Mapping[str, tuple[str, Any]]
) -> Any:
    """Let the exporter record a node outside of ONNX's own domain, and return its outputs.

    In the schema of the node, inputs are optional, and inputs and outputs may have any dtype.

    Args:
        domain, op_type: The type of the node.
        inputs: The inputs of the node.
        outputs: The number of outputs.
        attributes: The type and the value of each attribute, by name.
    """
    schema = onnx.defs.OpSchema
    optional = schema.FormalParameterOption.Optional
    letters = [f"T{at}" for at in range(len(inputs) + outputs)]
    described = schema(
        op_type,
        domain,
        VERSION,
        inputs=[
            schema.FormalParameter(f"input{at}", letters[at], param_option=optional)
            for at in range(len(inputs))
        ],
        outputs=[schema.FormalParameter(f"output{at}", letters[at - outputs]) for at in range(outputs)],
        type_constraints=[(letter, sorted(DTYPES), "any tensor") for letter in letters],
        attributes=[
            schema.Attribute(name, getattr(schema.AttrType, kind), required=False)
            for name, (kind, _) in attributes.items()
        ],
    )
    node = onnxscript.values.Op(onnxscript.values.Opset(domain, VERSION), op_type, described)
    return node(*inputs, **{name: value for name, (_, value) in attributes.items()})


CONVERTED: Mapping[str, Callable[[Any], Any]] = {"INT": int, "FLOAT": float, "STRING": str}
"""Python type of the values of an attribute, by the type of the attribute."""


def attribute_of(name: str, kind: str, items: Sequence[Any], *, several: bool) -> Any:
    """An attribute with one value or several values, of a type in `CONVERTED`."""
    values = [CONVERTED[kind](item) for item in items]
    form = onnx_ir.AttributeType[kind + "S" * several]
    return onnx_ir.Attr(name, form, values if several else values[0])


def varies(size: Any) -> bool:
    """Return True for a symbolic size, and False for a symbol that torch has resolved to a number.

    Example:
        >>> varies(3)
        False
    """
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def example_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor during tracing."""
    return tuple(example_size(size) for size in tensor.shape)


def example_size(size: Any) -> int:
    """The value of a size; for a symbolic size, its value during tracing.

    Raises:
        ExportError: If the size depends on the values of tensors.
    """
    if not varies(size):
        return int(size)
    hint = size.node.hint  # `int(size)` would make it constant
    if hint is None:
        raise errors.ExportError(
            "the size of a tensor depends on the values of other tensors, so no body can be derived",
            got=str(size),
            hint="compute these tensors outside of the operator, or export the operator with `body='node', "
            "verify=False`",
        )
    return int(hint)
