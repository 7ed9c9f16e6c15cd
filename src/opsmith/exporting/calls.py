"""A call of an operator in an exported program: its tensors in order, its other values, its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.core.schema import REQUIRED, Argument
from opsmith.core.specification import Specification
from opsmith.exporting.packages import onnx_ir
from opsmith.exporting.sizes import example_shape, example_size, varies
from opsmith.exporting.symbolic import Named


@dataclass(frozen=True)
class Call:
    """One call.

    Args:
        specification: The operator's.
        node: The call, in torch's graph.
        named: The node that the `symbolic` of its class made of it, if one did.
    """

    specification: Specification
    node: torch.fx.Node
    named: Named | None = None

    @property
    def place(self) -> tuple[str, str]:
        """Domain and type of its node."""
        if self.named is not None:
            return self.named.domain, self.named.op_type
        return self.specification.namespace, self.specification.short_name

    def formal(self) -> list[str]:
        """The inputs of its node, those that are left out behind the last aside."""
        slots = self.slots()
        if self.named is not None:
            return [
                f"left_out_{at}" if slot is None else slots[slot][0]
                for at, slot in enumerate(self.named.inputs)
            ]
        last = max((at for at, (_, node) in enumerate(slots) if node is not None), default=-1)
        return [name for name, _ in slots[: last + 1]]

    def values(self) -> Iterator[tuple[Argument, Any]]:
        """Each argument of torch's schema, with its value: for a tensor, the node that makes it."""
        for at, leaf in enumerate(self.specification.schema.leaves):
            if at < len(self.node.args):
                yield leaf, self.node.args[at]
            elif leaf.name in self.node.kwargs:
                yield leaf, self.node.kwargs[leaf.name]
            else:
                yield leaf, default(leaf)

    def slots(self) -> list[tuple[str, torch.fx.Node | None]]:
        """The inputs of the node in ONNX: name and origin, which is None where an optional one is absent."""
        return list(input_slots(list(self.values())))

    def inputs(self) -> list[torch.Tensor | torch.SymInt]:
        """What is there of them, without values: tensors, and then sizes."""
        return [node.meta["val"] for _, node in self.slots() if node is not None]

    def results(self) -> list[torch.Tensor]:
        """The results that are there, lists spread out, without their values."""
        return list(flat_results(self.node.meta["val"]))

    def dtypes(self) -> set[torch.dtype]:
        """Of its tensors, results included."""
        return {each.dtype for each in (*self.inputs(), *self.results()) if isinstance(each, torch.Tensor)}

    def signature(self) -> tuple[Any, ...]:
        """What a body depends on: sizes, `?` for those that vary, with an example; dtypes; other values."""
        described = [
            (leaf.name, _described(value) if leaf.kind.is_tensor or size_items(value) else repr(value))
            for leaf, value in self.values()
        ]
        return (self.specification.name, self.named, *described)


def default(leaf: Argument) -> Any:
    """What an argument is that a call leaves out, as torch's schema has it."""
    return None if leaf.default is REQUIRED else leaf.kind.lower(leaf.default)[0]


def input_slots(values: Sequence[tuple[Argument, Any]]) -> Iterator[tuple[str, Any]]:
    """The inputs of a node, from the values of a call: each tensor of a list has one of its own.

    Behind all tensors come the whole numbers that follow from dynamic axes, which no attribute can be.
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
    """What of an argument that is no tensor the graph computes as a whole number, by position."""
    items = value if isinstance(value, list | tuple) else [value]
    return {at: item for at, item in enumerate(items) if _is_size(item)}


def _is_size(item: Any) -> bool:
    if isinstance(item, torch.fx.Node):
        return isinstance(item.meta.get("val"), torch.SymInt)
    return isinstance(item, onnx_ir.Value)


def flat_results(value: Any) -> Iterator[Any]:
    """The tensors among results, lists of them spread out."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from flat_results(each)
    elif value is not None:
        yield value


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
    """Refuse a list of results before another result: a node's outputs are told by position alone.

    Raises:
        ExportError: If there is one.
    """
    shown: Sequence[Any] = [each for each in specification.schema.results if not each.hidden]
    if any(result.sequence for result in shown[:-1]):
        raise errors.ExportError(
            "it returns a list before another result, and a node of ONNX cannot tell where the list ends",
            operator=specification.name,
            expected="tensors, the last of which may be a list of them",
            got=", ".join(f"{result.name}: {result.annotation()}" for result in shown),
            where=specification.where,
            hint="return the list last, or its tensors one by one",
        )
