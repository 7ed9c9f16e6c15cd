"""What a translated model is given before it is written: names, and who made it of what."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from opsmith import __version__
from opsmith.core.source_hash import operator_hash
from opsmith.core.specification import Specification
from opsmith.exporting.axes import Axes
from opsmith.exporting.packages import onnx_ir

PREFIX = "model."
"""What `Flat` puts before the names of a model's parameters."""


def name_values(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Name the inputs and outputs of a model, and its tensors as in the state dict of what was exported.

    Returns:
        For each value that has another name now, the one that it had.
    """
    graph = model.graph
    before = {id(value): (value, value.name) for value in (*graph.outputs, *_values(graph))}
    for name in list(graph.initializers):
        value = graph.initializers.pop(name)
        value.name = name.removeprefix(PREFIX)
        graph.initializers[value.name] = value
    ends = [*graph.inputs, *graph.outputs]
    wanted = [*inputs, *outputs]
    for value in _values(graph):
        if value.name in wanted and not any(value is end for end in ends):
            _rename(graph, value, _free(value.name, wanted, graph))
    for value, name in zip(ends, wanted, strict=True):
        value.name = name
    return {value.name: name for value, name in before.values() if value.name != name}


def _rename(graph: Any, value: Any, name: str) -> None:
    held = graph.initializers.pop(value.name, None)
    value.name = name
    if held is not None:
        graph.initializers[name] = held


def _free(name: str, taken: Sequence[str], graph: Any) -> str:
    known = {value.name for value in _values(graph)} | set(taken)
    count = 1
    while f"{name}_{count}" in known:
        count += 1
    return f"{name}_{count}"


def _values(graph: Any) -> list[Any]:
    found = [*graph.inputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        found += node.outputs
    return found


def name_axes(model: Any, axes: Axes) -> None:
    """Give dynamic axes their names, wherever they or what is computed from them stand."""
    names: dict[str, str] = {}
    for value, of in zip(model.graph.inputs, axes.of, strict=True):
        for axis, name in of.items():
            names.setdefault(_text(value.shape[axis]), name)
    pattern = re.compile("|".join(rf"\b{re.escape(each)}\b" for each in names) or r"(?!)")
    for graph in model.graphs():
        for value in _values(graph):
            if value.shape is not None:
                value.shape = onnx_ir.Shape(
                    [
                        size
                        if isinstance(size, int)
                        else pattern.sub(lambda found: names[found[0]], _text(size))
                        for size in value.shape
                    ]
                )
    for value, of in zip(model.graph.inputs, axes.of, strict=True):
        sizes = [of.get(axis, size) for axis, size in enumerate(value.shape)]
        value.shape = onnx_ir.Shape(sizes)


def _text(size: Any) -> str:
    return str(getattr(size, "value", size))


def sign(model: Any, body: str, used: Iterable[Specification]) -> None:
    """Write into a model's metadata who made it, and of which sources its operators are."""
    hashes = {each.name: operator_hash(each) for each in used}
    model.metadata_props.update(
        {
            "opsmith.version": __version__,
            "opsmith.torch": str(torch.__version__),
            "opsmith.body": body,
            "opsmith.operators": json.dumps(hashes, sort_keys=True),
        }
    )


NOISE = ("pkg.torch", "namespace")
"""Beginnings of keys under which torch's exporter writes its graph, and paths of this machine."""


def strip(model: Any) -> None:
    """Drop what torch's exporter notes for itself: its graph, and names of files of this machine."""
    keep = {"pkg.torch.onnx.name_scopes"}
    for graph in model.graphs():
        _drop(graph.metadata_props, keep)
        for node in graph:
            _drop(node.metadata_props, keep)
        for value in _values(graph):
            _drop(value.metadata_props, keep)


def _drop(properties: Any, keep: set[str]) -> None:
    for key in [key for key in properties if key.startswith(NOISE) and key not in keep]:
        del properties[key]


def counted(names: Iterable[str]) -> Mapping[str, int]:
    """How often each name comes.

    Example:
        >>> counted(["a", "b", "a"])
        {'a': 2, 'b': 1}
    """
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found
