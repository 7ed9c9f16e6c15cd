"""Sections that need a run: the graph, the saved tensors, the ONNX exports, the benchmark."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from opsmith.checking.samples.sample import sample_named
from opsmith.core.operator import Operator
from opsmith.core.samples import first_call
from opsmith.core.tensors import sequence_like
from opsmith.drawing import Figure, Options, Saved, figure, trace


def graph_of(operator: Operator[..., Any]) -> Figure:
    """The interactive graph of the reference, the saved tensors and the formulas, on the first sample.

    Raises:
        MissingSamplesError: If there is no sample.
    """
    made = figure(trace(operator))
    # The page has its own first-level heading.
    return replace(made, markup=made.markup.replace("<h1>", '<p class="title">').replace("</h1>", "</p>"))


@dataclass(frozen=True)
class SavedEntry:
    """A saved tensor.

    Args:
        by: The node that saves it.
        saved: The tensor.
    """

    by: str
    saved: Saved


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that a call saves for the backward.

    Args:
        call: Description of the call.
        entries: The tensors.
        summary: Their total size.
    """

    call: str
    entries: tuple[SavedEntry, ...]
    summary: str


def saved_tensors(operator: Operator[..., Any]) -> SavedTensors:
    """The tensors that the first sample's call saves, if every floating input requires a gradient.

    Raises:
        MissingSamplesError: If there is no sample.
        NoGraphError: If no result requires a gradient.
    """
    schema = operator.specification.schema
    call = first_call(operator.specification, "shown")
    values = [_requiring(each) for each in schema.call_values(call.args, call.kwargs)]
    named = dict(zip(schema.names, values, strict=True))

    def run(**inputs: Any) -> Any:
        args, kwargs = schema.split([inputs[name] for name in schema.names])
        return operator(*args, **kwargs)

    names = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    graph = trace(run, Options(inputs=named, names=names, training=True, title=operator.name))
    entries = tuple(SavedEntry(node.label, each) for node in graph.nodes for each in node.saved)
    return SavedTensors(sample_named(0, schema.names, values), entries, graph.summary().partition("; ")[2])


def _requiring(value: Any) -> Any:
    if isinstance(value, list | tuple):
        holds_tensors = any(isinstance(each, Tensor) for each in value)
        return sequence_like(value, map(_requiring, value)) if holds_tensors else value
    inexact = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if inexact else value


BODIES: Mapping[str, str] = {
    "function": "a node of the operator's name, with its reference as a function in the file",
    "inline": "the nodes of the reference",
    "node": "a node of the operator's name, for which a runtime needs a kernel",
}


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Args:
        body: `function`, `inline` or `node`.
        means: Description of this kind of body.
        refused: The error; empty for none.
        opset: Version of ONNX's operators.
        nodes: Number of nodes of each operator in the file.
        difference: The largest difference from PyTorch, relative to the largest value.
        allowed: The tolerance.
        notes: Warnings, and inputs that were not compared.
        unverified: The reason why the file is not verified; empty if it is verified.
    """

    body: str
    means: str
    refused: str = ""
    opset: int = 0
    nodes: Mapping[str, int] = field(default_factory=dict)
    difference: float = 0.0
    allowed: float = 0.0
    notes: tuple[str, ...] = ()
    unverified: str = ""

    @property
    def state(self) -> str:
        """The state of its badge."""
        return "failed" if self.refused else "skipped" if self.unverified else "passed"


def exports_of(operator: Operator[..., Any]) -> tuple[ExportResult, ...]:
    """Export the first sample's call with each kind of body, into a temporary folder.

    Raises:
        MissingSamplesError: If there is no sample.
        MissingExtraError: If a package of ONNX is missing.
    """
    call = first_call(operator.specification, "shown")
    from opsmith.exporting import Export  # the packages of ONNX take a second to import
    from opsmith.exporting.export import export_bodies

    with tempfile.TemporaryDirectory() as folder:
        exports = export_bodies(operator, tuple(call.args), call.kwargs, Path(folder))
    results = []
    for body, each in exports.items():
        made = each.outcome
        if not isinstance(made, Export):
            results.append(ExportResult(body, BODIES[body], refused=str(made)))
            continue
        allowed = max((comparison.allowed for comparison in made.comparisons), default=0.0)
        notes = (*made.left_out, *each.warnings)
        found = made.opset, made.nodes, made.difference, allowed, notes
        results.append(ExportResult(body, BODIES[body], "", *found, made.unverified))
    return tuple(results)
