"""The first node of a translated model whose output is another than in torch's own program."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.exporting.files import save
from opsmith.exporting.places import where_called
from opsmith.exporting.rounding import Rounding
from opsmith.exporting.runtime import Runtime
from opsmith.exporting.tolerance import difference, in_coarser, tolerance
from opsmith.exporting.translating import OPERATOR


@dataclass(frozen=True)
class Culprit:
    """A node.

    Args:
        kind: Its type.
        value: The name of its output.
        operator: The operator that it calls, if it is one of ours.
        where: The line of the model that it comes from.
        difference: How far it is off.
    """

    kind: str
    value: str
    operator: str | None
    where: str | None
    difference: float

    def __str__(self) -> str:
        return f"`{self.kind}`, whose output `{self.value}` is off by {self.difference:.1e}"


class _Recording(torch.fx.Interpreter):
    """Runs a program of torch and keeps what every node returns."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node, and keep its value."""
        value = super().run_node(n)
        self.seen[n.name] = value
        return value


def first_difference(
    translated: Any,
    renamed: Mapping[str, str],
    names: Sequence[str],
    inputs: Sequence[Tensor],
    rounding: Rounding,
    *,
    library: Path | None = None,
) -> Culprit | None:
    """The first node whose output differs; None where none does, or the two cannot be run side by side.

    Args:
        translated: What torch's exporter returned, with the functions of our nodes.
        renamed: Torch's names of values, where they are others in the file.
        names, inputs: The inputs of the file.
        rounding: What rounds.
        library: A library of kernels that ONNX Runtime is given.
    """
    program = translated.exported_program
    recorded = _recorded(program, inputs)
    calls = {node.name: node for node in program.graph.nodes}
    places = [
        (node, value, renamed.get(value.name, value.name))
        for node in translated.model.graph
        for value in node.outputs
    ]
    places = [place for place in places if isinstance(recorded.get(place[2]), Tensor)]
    try:
        runtime = _every_value(translated.model, [value for _, value, _ in places], library)
        known = {name for name, _, _ in runtime.inputs}
        given = {name: tensor for name, tensor in zip(names, inputs, strict=True) if name in known}
        results = runtime.run(given)
    except (errors.OnnxRuntimeError, ValueError, OSError):
        return None  # a value that no output can have, or no room for the file
    for (node, value, name), got in zip(places, results, strict=True):
        want = recorded[name].detach().cpu()
        off, allowed = difference(got, want), tolerance(want.dtype, rounding.nodes)
        allowed = in_coarser(want.dtype, rounding.coarsest.get(value.name), rounding.nodes) or allowed
        if off > allowed.relative:
            kind, operator = node.op_type, node.metadata_props.get(OPERATOR)
            return Culprit(kind, name, operator, where_called(calls[name]), off)
    return None


def _every_value(model: Any, values: Sequence[Any], library: Path | None) -> Runtime:
    """ONNX Runtime with a model whose outputs are these values of it."""
    outputs = list(model.graph.outputs)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.graph.outputs[:] = values
            save(model, Path(folder) / "values.onnx")
        finally:
            model.graph.outputs[:] = outputs
        return Runtime(Path(folder) / "values.onnx", "every node", library=library)


def _recorded(program: Any, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """What each node of a program returns for these inputs."""
    rest = iter(inputs)
    held = {**program.state_dict, **program.constants}
    users = set(program.graph_signature.user_inputs)
    given = [
        next(rest) if each.arg.name in users else held[each.target]
        for each in program.graph_signature.input_specs
    ]
    recording = _Recording(program.graph_module)
    with torch.no_grad():
        recording.run(*given)
    return recording.seen
