"""Support for `symbolic` of adopted `autograd.Function` classes under torch's current exporter.

torch's old exporter called `symbolic` with a graph, whose `op` made a node. Here `op` makes the node in the
program that is being translated. No other part of the old graph is supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.core.location import where
from opsmith.core.specification import Specification
from opsmith.exporting.calls import SYMBOLIC_NODE, SymbolicNode, add_node, attribute_of, symbolic_of
from opsmith.exporting.packages import onnx, onnx_ir, onnxscript

FORMS = {"i": "INT", "f": "FLOAT", "s": "STRING", "t": "TENSOR"}
"""Type of an attribute, by the ending of its keyword in `g.op`."""


def by_symbolic(
    specification: Specification, values: Sequence[Any], tensors: Sequence[Any], opset: int, notes: list[str]
) -> Any:
    """Run the `symbolic` of an operator's class for a call, and return the values that it returns.

    Args:
        specification: The specification of the operator, whose class has a `symbolic`.
        values: The arguments, as `forward` takes them.
        tensors: The tensors among the arguments, in order; None for an omitted optional tensor.
        opset: Version of ONNX's operators.
        notes: List that gets the warnings for the author.

    Raises:
        ExportError: If `symbolic` fails, or makes unsupported nodes.
    """
    symbolic = symbolic_of(specification)
    assert symbolic is not None, specification.name
    graph = SymbolicGraph(specification, tensors, opset, notes)
    try:
        made = symbolic(graph, *values)
    except errors.OpsmithError:
        raise
    except Exception as error:  # the author's code may raise anything
        raise errors.ExportError(
            f"its `symbolic` cannot be run: {type(error).__name__}: {error}",
            operator=specification.name,
            where=where(symbolic),
            hint="let `symbolic` only call `g.op` on the arguments of `forward`; opsmith does not give it "
            "the sizes and types of values that the old exporter gave",
        ) from error
    return graph.returned(made)


class SymbolicGraph:
    """The graph `g` that is given to `symbolic`; its only method is `op`.

    Args:
        specification, tensors, opset, notes: As in `by_symbolic`.
    """

    def __init__(
        self, specification: Specification, tensors: Sequence[Any], opset: int, notes: list[str]
    ) -> None:
        self._specification, self._tensors = specification, tensors
        self._opset, self._notes = opset, notes
        self._others: list[Any] = []  # nodes outside of ONNX's own domain

    def op(self, name: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Make a node, and return its value, or a tuple of `outputs` values.

        Args:
            name: `domain::Name`, or the name of an operator of ONNX.
            inputs: Values; None for an omitted optional input.
            outputs: Number of outputs.
            attributes: Attributes. The ending of the name is the type: `_i` integers, `_f` floats, `_s`
                strings, `_t` a tensor. A list becomes a list.
        """
        domain, op_type = self._node_type(name)
        written = [self._attribute(key, value) for key, value in sorted(attributes.items())]
        named = {each.name: (each.type.name, _plain(each)) for each in written}
        if not domain:
            schema = onnx.defs.get_schema(op_type, max_inclusive_version=self._opset)
            node = onnxscript.values.Op(onnxscript.values.Opset("", self._opset), op_type, schema)
            made = node(*inputs, **{name: value for name, (_, value) in named.items()})
        else:
            made = add_node(domain, op_type, inputs, outputs, named)
            node = (made[0] if isinstance(made, tuple | list) else made).producer()
            node.meta[SYMBOLIC_NODE] = SymbolicNode(
                domain, op_type, self._positions(inputs), tuple(map(str, written))
            )
            self._others.append(node)
        return made

    def _node_type(self, name: str) -> tuple[str, str]:
        domain, colons, op_type = name.rpartition("::")
        if domain in ("onnx", "ai.onnx"):
            return "", op_type
        if colons:
            return domain, op_type
        if onnx.defs.has(op_type, max_inclusive_version=self._opset):
            return "", op_type
        domain = self._specification.namespace
        self._notes.append(
            f"`symbolic` of {self._class} names a node `{name}` without a domain, and ONNX has no such node, "
            f'so it goes into the domain `{domain}`; write `g.op("{domain}::{name}", ...)` to remove this '
            "warning"
        )
        return domain, op_type

    def _attribute(self, key: str, value: Any) -> Any:
        name, _, ending = key.rpartition("_")
        if not name or ending not in FORMS:
            raise self._refused(
                f"the attribute `{key}` of `g.op` has no type",
                "a name with one of these endings: " + ", ".join(f"_{each}" for each in FORMS),
                key,
                "write `stride_i=2` for whole numbers, `slope_f=0.5` for numbers, `mode_s='sum'` for texts",
            )
        if ending == "t":
            return onnx_ir.AttrTensor(name, onnx_ir.tensor(torch.as_tensor(value).detach().cpu().numpy()))
        several = isinstance(value, list | tuple)
        return attribute_of(name, FORMS[ending], value if several else [value], several=several)

    def _positions(self, inputs: Sequence[Any]) -> tuple[int | None, ...]:
        found: list[int | None] = []
        for value in inputs:
            at = next((at for at, tensor in enumerate(self._tensors) if tensor is value), None)
            if value is not None and at is None:
                raise self._refused(
                    "an input of the node that its `symbolic` makes is not a tensor of the call",
                    "the tensors that `forward` takes, in any order",
                    type(value).__name__,
                    "pass the tensors to the node unchanged, and pass numbers as attributes",
                )
            found.append(None if value is None else at)
        return tuple(found)

    def returned(self, made: Any) -> Any:
        """Validate and return the values that `symbolic` returned."""
        values = list(made) if isinstance(made, list | tuple) else [made]
        shown = [result for result in self._specification.schema.results if not result.hidden]
        if len(values) != len(shown) or any(value is None for value in values):
            raise self._refused(
                "its `symbolic` does not return one value for each result of `forward`",
                f"{len(shown)} value{'s' * (len(shown) != 1)} of `g.op`",
                f"{len(values)} value{'s' * (len(values) != 1)} of `g.op`",
                "write `outputs=` for a node with several results",
            )
        if self._others and (
            len(self._others) > 1 or any(value.producer() is not self._others[0] for value in values)
        ):
            raise self._refused(
                "its `symbolic` makes several nodes, and one of them is outside of ONNX's domain",
                "one node outside of ONNX's domain that has all results, or only nodes of ONNX",
                ", ".join(f"{node.domain}::{node.op_type}" for node in self._others),
                "make one node for the whole operator",
            )
        return made

    @property
    def _class(self) -> str:
        return self._specification.qualname

    def _refused(self, problem: str, expected: str, got: str, hint: str) -> errors.ExportError:
        return errors.ExportError(
            problem,
            operator=self._specification.name,
            expected=expected,
            got=got,
            where=self._specification.where,
            hint=hint,
        )


def _plain(attribute: Any) -> Any:
    return attribute if attribute.type == onnx_ir.AttributeType.TENSOR else attribute.value
