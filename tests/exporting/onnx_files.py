"""Reading an ONNX file in tests."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor

import opsmith
from opsmith.exporting import Export


@dataclass(frozen=True)
class Made:
    """A file that was exported, and what it holds."""

    export: Export
    model: Any

    @property
    def path(self) -> Path:
        return self.export.path

    def ours(self) -> list[Any]:
        """The nodes of operators that are not ONNX's own."""
        return [node for node in self.model.graph.node if node.domain]

    def shapes(self) -> dict[str, list[int | str]]:
        """Shapes of inputs and outputs, by name."""
        return {
            value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
            for value in (*self.model.graph.input, *self.model.graph.output)
        }

    def of(self, operator: str) -> list[Any]:
        """The nodes that call an operator, whatever their bodies are called."""
        return [
            node
            for node in self.ours()
            if {each.key: each.value for each in node.metadata_props}.get("opsmith.operator") == operator
        ]

    def in_runtime(self, *inputs: Tensor) -> list[Tensor]:
        """Results of stock ONNX Runtime, without anything of opsmith."""
        session = onnxruntime.InferenceSession(str(self.path), providers=["CPUExecutionProvider"])
        return [torch.from_numpy(each) for each in session.run(None, self._named(inputs))]

    def in_evaluator(self, *inputs: Tensor) -> list[Tensor]:
        """Results of ONNX's own evaluator, which knows functions and no `overload`."""
        results = ReferenceEvaluator(self.model).run(None, self._named(inputs))
        return [torch.from_numpy(np.asarray(each)) for each in results]

    def named(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        """Results, by the names of the outputs."""
        return dict(zip(self.export.outputs, results, strict=True))

    def _named(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        names = [value.name for value in self.model.graph.input]
        return {name: tensor.detach().numpy() for name, tensor in zip(names, inputs, strict=True)}


def exported(folder: Path, model: Any, args: Any, **options: Any) -> Made:
    """Export a model to a file in an empty folder, in which there is nothing else then."""
    path = folder / "model.onnx"
    with warnings.catch_warnings():  # of nodes without bodies and kernels
        warnings.filterwarnings(
            "ignore", "`model.onnx` is not verified: ONNX Runtime has no kernel for a node"
        )
        done = opsmith.export_onnx(model, args, path, **options)
    assert list(folder.iterdir()) == [path]
    return Made(done, onnx.load(path))


def attributes(node: Any) -> dict[str, Any]:
    """The attributes of a node, as Python has them."""
    found = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


def off(got: Sequence[Tensor], want: Any) -> float:
    """The largest difference, as a part of the largest value."""
    wanted = [each.detach() for each in ([want] if isinstance(want, Tensor) else want)]
    assert [each.shape for each in got] == [each.shape for each in wanted]
    assert [each.dtype for each in got] == [each.dtype for each in wanted]
    return max(
        float((one.double() - two.double()).abs().max() / max(two.double().abs().max().item(), 1e-30))
        for one, two in zip(got, wanted, strict=True)
    )
