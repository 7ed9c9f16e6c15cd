"""The ONNX file: the model's names and metadata, and a draft that is validated before it is published."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from opsmith import __version__, errors
from opsmith.core.output_file import unwritable
from opsmith.core.source_hash import operator_hash
from opsmith.core.specification import Specification
from opsmith.exporting.model import Axes
from opsmith.exporting.packages import onnx, onnx_ir

PREFIX = "model."
"""Prefix of the names of a model's parameters in `FlatModel`."""


def name_values(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Name the inputs and outputs of a model, and its tensors as in the state dict of the exported model.

    Returns:
        The earlier name of each renamed value.
    """
    graph = model.graph
    before = [(value, value.name) for value in (*graph.outputs, *_values(graph))]
    for value in [*graph.initializers.values()]:
        value.name = value.name.removeprefix(PREFIX)
    ends = [*graph.inputs, *graph.outputs]
    wanted = [*inputs, *outputs]
    taken = {value.name for value in _values(graph)} | {*wanted}
    for value in _values(graph):
        if value.name in wanted and not any(value is end for end in ends):
            value.name = next(name for at in count(1) if (name := f"{value.name}_{at}") not in taken)
            taken.add(value.name)
    for value, name in zip(ends, wanted, strict=True):
        value.name = name
    return {value.name: name for value, name in before if value.name != name}


def _values(graph: Any) -> list[Any]:
    found = [*graph.inputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        found += node.outputs
    return found


def name_axes(model: Any, axes: Axes) -> None:
    """Name the dynamic axes in all shapes, including sizes that are computed from dynamic axes."""
    names: dict[str, str] = {}
    for value, of in zip(model.graph.inputs, axes.of, strict=True):
        for axis, name in of.items():
            names.setdefault(_text(value.shape[axis]), name)
    pattern = re.compile("|".join(rf"\b{re.escape(each)}\b" for each in names) or r"(?!)")
    for graph in model.graphs():
        for value in _values(graph):
            if value.shape is not None:
                sizes = [
                    size if isinstance(size, int) else pattern.sub(lambda each: names[each[0]], _text(size))
                    for size in value.shape
                ]
                value.shape = onnx_ir.Shape(sizes)
    for value, of in zip(model.graph.inputs, axes.of, strict=True):
        value.shape = onnx_ir.Shape([of.get(axis, size) for axis, size in enumerate(value.shape)])


def _text(size: Any) -> str:
    return str(getattr(size, "value", size))


def add_metadata(model: Any, body: str, used: Iterable[Specification]) -> None:
    """Write versions, and the source hash of each operator, into the metadata of a model."""
    hashes = {each.name: operator_hash(each) for each in used}
    model.metadata_props.update(
        {
            "opsmith.version": __version__,
            "opsmith.torch": str(torch.__version__),
            "opsmith.body": body,
            "opsmith.operators": json.dumps(hashes, sort_keys=True),
        }
    )


EXPORTER_KEYS = ("pkg.torch", "namespace")
"""Prefixes of metadata keys for torch's graph and paths of this machine."""


def strip_metadata(model: Any) -> None:
    """Remove the metadata of torch's exporter: its graph, and paths of this machine."""
    for graph in model.graphs():
        for owner in (graph, *graph, *_values(graph)):
            for key in [*owner.metadata_props]:
                if key.startswith(EXPORTER_KEYS) and key != "pkg.torch.onnx.name_scopes":
                    del owner.metadata_props[key]


LIMIT = 2**31 - 2**24
"""Maximum size in bytes of the tensors inside the file: a protobuf message is smaller than 2 GiB."""


def save(model: Any, file: Path) -> None:
    """Write an onnx_ir model; if its tensors exceed the limit, its initializers go into `FILE.data`.

    Tensors in attributes of nodes, such as constants of a body, count too, but they stay in the file.
    """
    held = sum(each.nbytes for each in tensors_in(model))
    onnx_ir.save(model, file, external_data=f"{file.name}.data" if held > LIMIT else None)


def tensors_in(model: Any) -> Iterator[Any]:
    """The tensors in an onnx_ir model: initializers, and attributes of nodes, functions included."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
    for graph in (*model.graphs(), *model.functions.values()):
        for node in graph.all_nodes():
            for attribute in node.attributes.values():
                if attribute.type == onnx_ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield attribute.value


class DraftFile:
    """A file that is not published yet.

    Args:
        folder: A temporary folder next to the final path.
        path: The final path.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path

    @property
    def file(self) -> Path:
        """The current path of the file."""
        return self._folder / self._path.name

    def write(self, model: Any) -> None:
        """Write an onnx_ir model with its tensors, replace an earlier draft, and validate the file.

        Raises:
            ExportError: If the file is not valid.
        """
        for each in self._folder.iterdir():
            each.unlink()
        save(model, self.file)
        try:
            onnx.checker.check_model(str(self.file), full_check=True)
        except Exception as error:  # its exceptions share no base class
            raise errors.ExportError(
                f"torch's exporter wrote an invalid file: {' '.join(str(error).split())}",
                hint="try a later `opset=`: it may have an operator that the model needs",
            ) from error

    def publish(self) -> None:
        """Move the file to its final path, and replace an earlier file."""
        for each in sorted(self._folder.iterdir(), key=lambda file: file.name == self._path.name):
            os.replace(each, self._path.parent / each.name)  # the model last, after its data


@contextmanager
def drafted(path: Path, argument: str = "path") -> Iterator[DraftFile]:
    """A region with the draft of a file, which is deleted at the end if it was not published.

    Args:
        path: The final path.
        argument: Name of the argument with the path.

    Raises:
        UsageError: If the file cannot be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield DraftFile(folder, path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise unwritable(path, error, argument=argument) from error
