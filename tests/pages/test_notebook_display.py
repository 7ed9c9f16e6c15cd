"""Values show themselves in a notebook: in a frame that requests nothing and leaves the notebook alone."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paged
import pytest
import torch
from html_reader import Reader

import opsmith
from opsmith.benchmarking import Benchmark
from opsmith.checking import Failure, Outcome, Report

FAILURE = Failure("gradient", "x", "sign", "`x` is wrong </iframe><script>boom()</script>", "file.py:3")
REPORT = Report("demo::op", (Outcome("gradient", "failed", failures=(FAILURE,)),), 0)
BENCHMARK = Benchmark("demo::op", "quick", 0, 1, {}, {}, (), ())
VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "report": (lambda: REPORT, "Negate the formula"),
    "failure": (lambda: FAILURE, "Negate the formula"),
    "benchmark": (lambda: BENCHMARK, "demo::op: 1 thread"),
    "operator": (lambda: paged.affine, "The origin of each aspect"),
    "graph": (lambda: opsmith.draw(paged.affine), "This picture needs JavaScript"),
}


def inside(value: Any) -> str:
    """The page in the frame of a value."""
    shown = value._repr_html_()
    found = re.fullmatch(
        r'<iframe title="[^"<>]+" sandbox="allow-scripts" srcdoc="([^"]+)" style="[^"]+"></iframe>', shown
    )
    assert found is not None, shown[:200]
    assert "<" not in found[1]
    return html.unescape(found[1])


@pytest.mark.parametrize("name", VALUES)
def test_a_value_shows_itself_in_a_frame_of_its_own(name: str) -> None:
    make, words = VALUES[name]
    page = inside(make())
    read = Reader(page)
    assert words in read.text
    assert "<script>boom()" not in page
    assert page.startswith("<!doctype html>")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'")
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)


def test_an_explanation_shows_itself_as_text() -> None:
    explained = opsmith.ops.exp.explain(torch.ones(2))
    shown = explained._repr_html_()
    assert html.unescape(shown) == f"<pre>{explained}</pre>"


def test_draw_without_a_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    graph = opsmith.draw(model, inputs=torch.ones(1, 3), depth=0)
    assert list(tmp_path.iterdir()) == []
    written = opsmith.draw(model, tmp_path / "graph.html", inputs=torch.ones(1, 3), depth=0)
    assert written.summary() == graph.summary()
    assert (tmp_path / "graph.html").read_text(encoding="utf-8").startswith(inside(graph)[:200])
    assert '"open":false' in inside(graph)
    assert '"open":true' in inside(opsmith.draw(model, inputs=torch.ones(1, 3), depth=1))
    with pytest.raises(opsmith.errors.UsageError, match="`depth` must be a number of levels"):
        opsmith.draw(model, inputs=torch.ones(1, 3), depth=-1)
