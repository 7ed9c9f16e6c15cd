"""The notebooks run from top to bottom, print what they say they print, and show what they show as HTML."""

from __future__ import annotations

import json
import re
from pathlib import Path

import notebooks
import pytest

SHOWN = {
    "adopt_a_file": ["operator notebook::swish", "check of notebook::swish"],
    "cuda_race_without_a_gpu": ["check of notebook::turned", "failure: cuda: race"],
    "find_a_wrong_gradient": [
        "operator notebook::softmax",
        "check of notebook::softmax",
        "failure: gradient of `x`: missing-term",
        "graph: notebook::softmax",
    ],
}
"""The titles of the frames in each notebook."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(each, id=each.stem, marks=[pytest.mark.slow] * (each.stem != "find_a_wrong_gradient"))
        for each in notebooks.paths()
    ],
)
def test_a_notebook_runs_and_prints_what_it_holds(path: Path, tmp_path: Path) -> None:
    held = json.loads(path.read_text(encoding="utf-8"))["cells"]
    run = notebooks.executed(path, tmp_path).cells
    for before, after in zip(held, run, strict=True):
        kept = [
            "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
            for output in before.get("outputs", [])
        ]
        assert kept == notebooks.texts(after), "python tests/examples/notebooks.py renews it"
    frames = re.findall(r'<iframe title="([^"]*)"', "".join(map(notebooks.shown, run)))
    assert [title for title in frames if title not in SHOWN[path.stem]] == []
    assert set(frames) == set(SHOWN[path.stem])


@pytest.mark.parametrize("path", notebooks.paths(), ids=lambda path: path.stem)
def test_a_notebook_is_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 12_000
    assert "text/html" not in text  # a site that shows notebooks would show an empty frame in its place
