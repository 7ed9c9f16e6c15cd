"""Tests of pages export nothing, apart from the one that is about exports."""

from __future__ import annotations

import pytest

from opsmith.pages import content
from opsmith.pages.sections import BODIES, ExportResult


@pytest.fixture
def no_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports that nobody has to wait for: one that went well, one refused, and one not verified."""
    made = (
        ExportResult("function", BODIES["function"], "", 20, {"paged::affine": 1}, 1e-7, 1e-6, ("a note",)),
        ExportResult("inline", BODIES["inline"], "ExportError: `sort` has no counterpart"),
        ExportResult("node", BODIES["node"], "", 20, {"paged::affine": 1}, unverified="no kernel for a node"),
    )
    monkeypatch.setattr(content, "exports_of", lambda operator: made)
