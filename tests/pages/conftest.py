"""What keeps tests of pages short: exports are made by the test that is about them alone."""

from __future__ import annotations

import pytest

from opsmith.pages import looking
from opsmith.pages.exports import BODIES, Exported


@pytest.fixture
def no_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports that nobody has to wait for: one that went well, and two that were refused."""
    made = (
        Exported("function", BODIES["function"], "", 20, {"paged::affine": 1}, 1e-7, 1e-6, ("a note",)),
        Exported("inline", BODIES["inline"], "ExportError: `sort` has no counterpart"),
        Exported("node", BODIES["node"], "ExportError: `sort` has no counterpart"),
    )
    monkeypatch.setattr(looking, "exports_of", lambda operator: made)
