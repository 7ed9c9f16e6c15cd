"""ONNX files of exports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from onnx_files import Made, exported


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Made]:
    """Export a model to a file of this test's own."""
    return partial(exported, tmp_path)
