"""`symbolic` of adopted `autograd.Function` classes: the nodes that it names, under today's exporter.

torch's old exporter called it with a graph, whose `op` made a node. Here `op` makes the node in the program
that is being translated; nothing else of the old graph is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.core.location import where
from opsmith.core.specification import Specification
from opsmith.exporting.packages import onnx, onnx_ir, onnxscript
from opsmith.exporting.tensors import DTYPES

NAMED = "opsmith_named"
"""Key, in the notes that a node keeps until it is written, of what its `symbolic` said."""

FORMS = {"i": "INT", "f": "FLOAT", "s": "STRING", "t": "TENSOR"}
"""Forms of attributes, by what the names of keywords of `g.op` end with."""


@dataclass(frozen=True)
class Named:
    """A node that is not ONNX's own, as a `symbolic` asked for it.

    Args:
        domain, op_type: Its name.
        inputs: Its inputs in order: each a position among the tensors of the call; None: left out.
        attributes: Texts of its attributes, by which calls are told apart.
    """

    domain: str
    op_type: str
    inputs: tuple[int | None, ...]
    attributes: tuple[str, ...]


def symbolic_of(specification: Specification) -> Callable[..., Any] | None:
    """The `symbolic` of the class that an operator was adopted from, if it has one."""
    adopted = specification.adopted
    return None if adopted is None else getattr(adopted.function_class, "symbolic", None)


def by_symbolic(
    specification: Specification, values: Sequence[Any], tensors: Sequence[Any], opset: int, notes: list[str]
) -> Any:
    """What the `symbolic` of an operator's class returns for a call: values of the nodes that it has made.

    Args:
        specification: The operator's; its class has a `symbolic`.
        values: The arguments, as `forward` has them.
        tensors: The tensors among them, in order; None where an optional one is left out.
        opset: Version of ONNX's operators.
        notes: Takes up what the author should know.

    Raises:
        ExportError: If it does what cannot be done here.
    """
    symbolic = symbolic_of(specification)
    assert symbolic is not None, specification.name
    graph = Graph(specification, tensors, opset, notes)
    try:
        made = symbolic(graph, *values)
    except errors.OpsmithError:
        raise
    except Exception as error:  # whatever the author's code raises
        raise errors.ExportError(
            f"its `symbolic` cannot be run: {type(error).__name__}: {error}",
            operator=specification.name,
            where=where(symbolic),
            hint="let it call `g.op` on the arguments of `forward` alone: what else the old exporter had, "
            "as sizes and types of values, is not there",
        ) from error
    return graph.returned(made)


class Graph:
    """What a `symbolic` has for the graph `g`: it has `op`, and makes nodes of it.

    Args:
        specification, tensors, opset, notes: As in `by_symbolic`.
    """

    def __init__(
        self, specification: Specification, tensors: Sequence[Any], opset: int, notes: list[str]
    ) -> None:
        self._specification, self._tensors = specification, tensors
        self._opset, self._notes = opset, notes
        self._others: list[Any] = []  # nodes that are not ONNX's own

    def op(self, name: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Make a node: its value, or a tuple of `outputs` values.

        Args:
            name: `domain::Name`, or the name of an operator of ONNX.
            inputs: Values; None where an optional one is left out.
            outputs: How many it has.
            attributes: Each with an ending that says what it is: `_i` whole numbers, `_f` numbers, `_s`
                texts, `_t` a tensor; a list of them becomes a list.
        """
        domain, op_type = self._place(name)
        written = [self._attribute(key, value) for key, value in sorted(attributes.items())]
        described = _described(domain, op_type, len(inputs), outputs, written, self._opset)
        version = 1 if domain else self._opset
        made = onnxscript.values.Op(onnxscript.values.Opset(domain, version), op_type, described)(
            *inputs, **{each.name: _plain(each) for each in written}
        )
        if domain:
            node = (made[0] if isinstance(made, tuple | list) else made).producer()
            node.meta[NAMED] = Named(domain, op_type, self._positions(inputs), tuple(map(str, written)))
            self._others.append(node)
        return made

    def _place(self, name: str) -> tuple[str, str]:
        domain, colons, op_type = name.rpartition("::")
        if domain in ("onnx", "ai.onnx"):
            return "", op_type
        if colons:
            return domain, op_type
        if onnx.defs.has(op_type, max_inclusive_version=self._opset):
            return "", op_type
        stated = self._specification.namespace
        self._notes.append(
            f"`symbolic` of {self._class} names a node `{name}` and no domain, and ONNX has no such node: "
            f'it is put into the domain `{stated}`: write `g.op("{stated}::{name}", ...)`, and this warning '
            "goes"
        )
        return stated, op_type

    def _attribute(self, key: str, value: Any) -> Any:
        name, _, ending = key.rpartition("_")
        if not name or ending not in FORMS:
            raise self._refused(
                f"`g.op` cannot tell what its attribute `{key}` is",
                "a name with one of these endings: " + ", ".join(f"_{each}" for each in FORMS),
                key,
                "write `stride_i=2` for whole numbers, `slope_f=0.5` for numbers, `mode_s='sum'` for texts",
            )
        if ending == "t":
            return onnx_ir.AttrTensor(name, onnx_ir.tensor(torch.as_tensor(value).detach().cpu().numpy()))
        several = isinstance(value, list | tuple)
        items = [_PYTHON[ending](item) for item in (value if several else [value])]
        form = onnx_ir.AttributeType[FORMS[ending] + ("S" if several else "")]
        return onnx_ir.Attr(name, form, items if several else items[0])

    def _positions(self, inputs: Sequence[Any]) -> tuple[int | None, ...]:
        found: list[int | None] = []
        for value in inputs:
            at = next((at for at, tensor in enumerate(self._tensors) if tensor is value), None)
            if value is not None and at is None:
                raise self._refused(
                    "its `symbolic` gives a node of another domain something that is no tensor of the call",
                    "the tensors that `forward` takes, in any order",
                    type(value).__name__,
                    "let the node have the tensors as they come, and numbers as attributes",
                )
            found.append(None if value is None else at)
        return tuple(found)

    def returned(self, made: Any) -> Any:
        """What the `symbolic` returned, once it is held to be what can be done here."""
        values = list(made) if isinstance(made, list | tuple) else [made]
        shown = [result for result in self._specification.schema.results if not result.hidden]
        if len(values) != len(shown) or any(value is None for value in values):
            raise self._refused(
                "its `symbolic` does not return what `forward` does",
                f"{len(shown)} values of `g.op`",
                f"{len(values)} of them",
                "write `outputs=` for a node with several results",
            )
        if self._others and (
            len(self._others) > 1 or any(value.producer() is not self._others[0] for value in values)
        ):
            raise self._refused(
                "its `symbolic` makes a node of another domain among others",
                "one node of another domain that has all results, or nodes of ONNX alone",
                ", ".join(f"{node.domain}::{node.op_type}" for node in self._others),
                "let one node stand for the whole operator",
            )
        return made

    @property
    def _class(self) -> str:
        adopted = self._specification.adopted
        return self._specification.qualname if adopted is None else adopted.name

    def _refused(self, problem: str, expected: str, got: str, hint: str) -> errors.ExportError:
        return errors.ExportError(
            problem,
            operator=self._specification.name,
            expected=expected,
            got=got,
            where=self._specification.where,
            hint=hint,
        )


_PYTHON: dict[str, Callable[[Any], Any]] = {"i": int, "f": float, "s": str}


def _plain(attribute: Any) -> Any:
    return attribute if attribute.type == onnx_ir.AttributeType.TENSOR else attribute.value


def _described(
    domain: str, op_type: str, inputs: int, outputs: int, attributes: Iterable[Any], opset: int
) -> Any:
    """The schema of a node: ONNX's own, or one that takes what it is given."""
    schema = onnx.defs.OpSchema
    if not domain:
        return onnx.defs.get_schema(op_type, max_inclusive_version=opset)
    optional = schema.FormalParameterOption.Optional
    letters = [f"T{at}" for at in range(inputs + outputs)]
    return schema(
        op_type,
        domain,
        1,
        inputs=[
            schema.FormalParameter(f"input{at}", letters[at], param_option=optional) for at in range(inputs)
        ],
        outputs=[schema.FormalParameter(f"output{at}", letters[inputs + at]) for at in range(outputs)],
        type_constraints=[(letter, sorted(DTYPES), "any tensor") for letter in letters],
        attributes=[
            schema.Attribute(each.name, getattr(schema.AttrType, each.type.name), required=False)
            for each in attributes
        ],
    )
