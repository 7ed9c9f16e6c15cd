"""Fixture that installs a package with a kernel language."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_language import Install

from opsmith.checking.properties import PROPERTIES, USUAL
from opsmith.kernels import languages


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Function that installs a package with an entry point, and the text of its module."""

    def installed(package: str, text: str, key: str = "toy", value: str = "") -> None:
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        entry = value or f"{module}:LANGUAGE"
        (info / "entry_points.txt").write_text(f"[{languages.GROUP}]\n{key} = {entry}\n")

    monkeypatch.syspath_prepend(tmp_path)
    before = {*sys.modules}
    yield installed
    languages._loaded.pop("toy", None)
    if PROPERTIES.pop("toy", None) is not None:
        USUAL.remove("toy")
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
