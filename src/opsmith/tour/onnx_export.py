"""Stage: export both models to ONNX, and compare ONNX Runtime with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.ops import Linear
from opsmith.tour.digits import DigitNetwork, split_digits
from opsmith.tour.stage import StageResult, TourContext, read_weights, write_json

CLOSE = 1e-5
"""Allowed difference of an output, as a fraction of the largest value."""


def export_and_load(model: nn.Module, example: Tensor, path: Path) -> tuple[Any, Any]:
    """Export a model with a dynamic batch dimension, and load the file.

    Returns:
        The result of the export, and the file as a module.
    """
    # The packages of ONNX take a second to import, and only this stage needs them.
    import opsmith.onnx

    model.eval()
    export = opsmith.export_onnx(
        model, example, path, input_names=["x"], output_names=["y"], dynamic={"x": {0: "batch"}}
    )
    return export, opsmith.onnx.load(path)


@thread_count(1)
@torch.no_grad()
def run(context: TourContext) -> StageResult:
    """Export both models, print their accuracy in PyTorch and in ONNX Runtime, and write `onnx.json`."""
    plane, network = Linear(2, 1, dtype=torch.float64), DigitNetwork()
    read_weights(context.out / "linear.pt", plane)
    read_weights(context.out / "digits.pt", network)
    _, test = split_digits(context.seed)
    points = torch.rand(16, 2, generator=torch.Generator().manual_seed(context.seed), dtype=torch.float64)
    plane_export, plane_file = export_and_load(plane, points, context.out / "linear.onnx")
    digits_export, digits_file = export_and_load(network, test.pixels[:4], context.out / "digits.onnx")
    in_torch, in_runtime = network(test.pixels).argmax(1), digits_file(test.pixels).argmax(1)
    details = {
        "files": {
            each.path.name: {"nodes": dict(each.nodes), "opset": each.opset, "difference": each.difference}
            for each in (plane_export, digits_export)
        },
        "plane_difference": (plane(points) / plane_file(points) - 1).abs().max().item(),
        "accuracy": {
            "PyTorch": (in_torch == test.labels).double().mean().item(),
            "ONNX Runtime": (in_runtime == test.labels).double().mean().item(),
        },
        "test_images": len(test),
        "read_alike": int((in_torch == in_runtime).sum()),
        "allowed_difference": CLOSE,
    }
    context.console.print(_table(details))
    passed = details["read_alike"] == len(test) and details["plane_difference"] <= CLOSE
    headline = (
        f"{details['read_alike']} of {len(test)} held-out images are read alike by PyTorch "
        f"({details['accuracy']['PyTorch']:.1%}) and ONNX Runtime ({details['accuracy']['ONNX Runtime']:.1%})"
    )
    files = (plane_export.path, digits_export.path, write_json(context.out / "onnx.json", details))
    return StageResult(passed, headline, details, files)


def _table(details: Mapping[str, Any]) -> Table:
    table = Table("file", "nodes of our operators", "off by", "right in PyTorch", "in ONNX Runtime")
    for name, file in details["files"].items():
        nodes = ", ".join(f"{count} {operator}" for operator, count in file["nodes"].items())
        accuracy = details["accuracy"].values() if name == "digits.onnx" else ()
        table.add_row(name, nodes, f"{file['difference']:.1e}", *(f"{each:.1%}" for each in accuracy))
    return table
