"""Files of ONNX beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx_files import Made

import opsmith


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Made]:
    """Export a model to a file of this test's own."""

    def export(model: Any, args: Any, **options: Any) -> Made:
        path = tmp_path / "model.onnx"
        done = opsmith.export_onnx(model, args, path, **options)
        assert list(tmp_path.iterdir()) == [path]
        return Made(done, onnx.load(path))

    return export
