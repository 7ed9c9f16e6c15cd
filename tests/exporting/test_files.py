"""Files: beyond ONNX's limit tensors go into a file of their own, and nothing is half written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import onnx_operators as of
import pytest
import torch
from onnx_operators import Calls

import opsmith
import opsmith.onnx
from opsmith import errors
from opsmith.exporting import model_file


@pytest.mark.slow
def test_tensors_beyond_the_limit_are_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_file, "LIMIT", 4096)
    model, x = opsmith.ops.Linear(64, 64).eval(), torch.randn(3, 64)
    opsmith.export_onnx(model, x, tmp_path / "model.onnx")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert (tmp_path / "model.onnx").stat().st_size < 4096
    assert torch.allclose(opsmith.onnx.load(tmp_path / "model.onnx")(x), model(x).detach(), atol=1e-6)
    opsmith.export_onnx(model, x, tmp_path / "node.onnx", body="node", verify=False)
    assert (tmp_path / "node.onnx.data").stat().st_size >= 64 * 64 * 4
    monkeypatch.undo()
    opsmith.export_onnx(model, x, tmp_path / "whole.onnx")
    assert (tmp_path / "whole.onnx").stat().st_size > 64 * 64 * 4
    assert not (tmp_path / "whole.onnx.data").exists()


@pytest.mark.slow
def test_beyond_the_limit_the_first_node_that_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_file, "LIMIT", 64)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), Calls(of.off), torch.nn.Linear(6, 2)).eval()
    with pytest.raises(errors.ExportMismatchError) as caught:
        opsmith.export_onnx(model, torch.linspace(-1, 1, 24).reshape(4, 6), tmp_path / "model.onnx")
    assert caught.value.operator == "nodes::off"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_constant_of_a_body_counts(tmp_path: Path) -> None:
    """It has no tensors but the three numbers in the function."""
    opsmith.export_onnx(of.constant, torch.ones(2, 3), tmp_path / "model.onnx", verify=False)
    model = onnx_ir.load(tmp_path / "model.onnx")
    assert not model.graph.initializers
    assert sum(each.nbytes for each in model_file.tensors_in(model)) >= 12


def test_a_file_that_onnx_refuses_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise onnx.checker.ValidationError("Field 'type' is missing")

    monkeypatch.setattr(model_file.onnx.checker, "check_model", refuse)
    with pytest.raises(errors.ExportError) as caught:
        opsmith.export_onnx(opsmith.ops.exp, torch.ones(2), tmp_path / "model.onnx")
    assert caught.value.message() == (
        "torch's exporter wrote an invalid file: Field 'type' is missing\n"
        "  hint: try a later `opset=`: it may have an operator that the model needs"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_file.onnx_ir, "save", full)
    with pytest.raises(errors.UsageError) as caught:
        opsmith.export_onnx(opsmith.ops.exp, torch.ones(2), tmp_path / "model.onnx")
    assert caught.value.got == "No space left on device"
    assert not list(tmp_path.iterdir())
