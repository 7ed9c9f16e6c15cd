"""Exports of one call with each form of body, from one translation."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import opsmith
from opsmith.exporting import export


@pytest.mark.slow
def test_a_copy_has_nodes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = export._written

    def inspected(translated: export.TranslatedModel, options: Any) -> Any:
        nodes = set(translated.model.graph.all_nodes())
        assert translated.calls
        assert all(node in nodes for node, _ in translated.calls)
        return written(translated, options)

    monkeypatch.setattr(export, "_written", inspected)
    made = export.export_bodies(opsmith.ops.exp, (torch.ones(3),), {}, tmp_path)
    assert all(isinstance(each.outcome, export.Export) for each in made.values()), made


@pytest.mark.slow
def test_a_warning_belongs_to_one_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translate, written = export._translated, export._written

    def warned(*arguments: Any) -> Any:
        warnings.warn("translated", UserWarning, stacklevel=2)
        return translate(*arguments)

    def warned_again(translated: Any, options: Any) -> Any:
        warnings.warn(f"written as {options.body}", UserWarning, stacklevel=2)
        return written(translated, options)

    monkeypatch.setattr(export, "_translated", warned)
    monkeypatch.setattr(export, "_written", warned_again)
    made = export.export_bodies(opsmith.ops.exp, (torch.ones(3),), {}, tmp_path)
    assert {body: each.warnings for body, each in made.items()} == {
        body: ("translated", f"written as {body}") for body in ("function", "inline", "node")
    }
