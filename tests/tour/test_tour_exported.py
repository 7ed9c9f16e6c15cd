"""The tour's models as files of ONNX."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from rich.console import Console

from opsmith.ops import Linear
from opsmith.tour import TourContext, onnx_export
from opsmith.tour.digits import DigitNetwork
from opsmith.tour.stage import write_weights

pytestmark = pytest.mark.slow

made: dict[str, tuple[Any, Any]] = {}
"""Exports of the stage and the files that were loaded, by name."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Any]:
    """The stage behind two models that have learned nothing."""
    real = onnx_export.export_and_load

    def recorded(model: Any, example: Any, path: Path) -> tuple[Any, Any]:
        made[path.name] = real(model, example, path)
        return made[path.name]

    out, said = tmp_path_factory.mktemp("tour"), io.StringIO()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_weights(out / "linear.pt", Linear(2, 1, dtype=torch.float64))
        write_weights(out / "digits.pt", DigitNetwork())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_export, "export_and_load", recorded)
        result = onnx_export.run(TourContext(out, torch.device("cpu"), Console(file=said, width=120)))
    return out, said.getvalue(), result


def test_both_read_every_image_alike(ran: tuple[Path, str, Any]) -> None:
    out, said, result = ran
    assert result.passed
    assert result.details["read_alike"] == result.details["test_images"] == 360
    right = result.details["accuracy"]
    assert right["PyTorch"] == right["ONNX Runtime"] < 0.5
    assert said.count(f"{right['PyTorch']:.1%}") == 2
    assert {path.name for path in result.files} == {"linear.onnx", "digits.onnx", "onnx.json"}
    assert json.loads((out / "onnx.json").read_text()) == result.details


def test_the_files_have_our_operators_as_nodes(ran: tuple[Path, str, Any]) -> None:
    out, _, result = ran
    model = onnx.load(out / "digits.onnx")
    onnx.checker.check_model(model, full_check=True)
    nodes = [node.op_type.rstrip("_2345") for node in model.graph.node if node.domain == "opsmith"]
    counted = result.details["files"]["digits.onnx"]["nodes"]
    assert nodes.count("involution") == counted["opsmith::involution"] == 3
    sizes = [size.dim_param or size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    assert sizes == ["batch", 1, 8, 8]


def test_one_image_that_is_read_otherwise_does_not_pass(
    ran: tuple[Path, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _, _ = ran

    def other(model: Any, example: Any, path: Path) -> tuple[Any, Any]:
        model.eval()
        export, file = made[path.name]

        def wrong(x: torch.Tensor) -> torch.Tensor:
            y = file(x).clone()
            return torch.cat([y[:1].flip(1), y[1:]]) if path.name == "digits.onnx" else y

        return export, wrong

    monkeypatch.setattr(onnx_export, "export_and_load", other)
    result = onnx_export.run(TourContext(out, torch.device("cpu"), Console(file=io.StringIO())))
    assert not result.passed
    assert result.headline.startswith("359 of 360 held-out images are read alike")
