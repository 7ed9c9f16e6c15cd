"""The stages of pages and of pictures, and the index that links all of them."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from html_reader import Reader
from rich.console import Console
from short_benchmarks import shorten_benchmarks

import opsmith
from opsmith.checking import Outcome, Report
from opsmith.ops import Linear
from opsmith.pages import content
from opsmith.tour import StageResult, TourContext, TourStage, operator_pages, pictures, run_tour
from opsmith.tour.digits import DigitNetwork
from opsmith.tour.pictures import learning_curves
from opsmith.tour.stage import write_json, write_weights

LINE = {"curve": {"step": [1, 2, 3], "loss": [4.0, 1.0, 0.1]}}
DIGITS = {
    "curve": {"epoch": [1, 2], "loss": [2.0, 0.5], "accuracy": [0.5, 0.98]},
    "required_accuracy": 0.97,
}


def earlier(out: Path) -> None:
    """Write the files of earlier stages: models that have learned nothing, checks that nobody ran."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_weights(out / "linear.pt", Linear(2, 1, dtype=torch.float64))
        write_weights(out / "digits.pt", DigitNetwork())
    write_json(out / "linear.json", LINE)
    write_json(out / "digits.json", DIGITS)
    outcomes = (Outcome("forward", "passed"), Outcome("gradient", "passed"))
    write_json(
        out / "checks.json", [Report(each.name, outcomes, 0).to_dict() for each in operator_pages.PAGED]
    )


Ran = tuple[Path, StageResult]


def run_stage(stage: Any, out: Path) -> Ran:
    earlier(out)
    return out, stage.run(TourContext(out, torch.device("cpu"), Console(file=io.StringIO())))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_stage(pictures, tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    with pytest.MonkeyPatch.context() as patch:
        # Exports and kernels have tests of their own.
        shorten_benchmarks(patch)
        patch.setattr(content, "exports_of", lambda operator: ())
        patch.setattr(content, "kernels_of", lambda operator, architectures: content.NO_KERNEL)
        yield run_stage(operator_pages, tmp_path_factory.mktemp("pages"))


PICTURES = {
    "curves.svg",
    "curves.png",
    *(f"{stem}-graph.{form}" for stem in ("example", "digits") for form in ("svg", "png", "html")),
}
PAGES = {
    *("checks.html", "involution.json", "involution-roofline.svg", "involution-scaling.svg"),
    *("pages/index.html", "pages/opsmith-linear.html", "pages/opsmith-involution.html"),
    "pages/opsmith_tour-swish.html",
}


@pytest.mark.parametrize(
    ("fixture", "names"), [("drawn", PICTURES), pytest.param("paged", PAGES, marks=pytest.mark.slow)]
)
def test_every_file_is_there_and_is_what_its_name_says(
    fixture: str, names: set[str], request: pytest.FixtureRequest
) -> None:
    out, result = request.getfixturevalue(fixture)
    assert {file.relative_to(out).as_posix() for file in result.files} == names
    starts = {".png": b"\x89PNG", ".html": b"<!doctype html>", ".json": b"{"}
    for file in result.files:
        assert file.read_bytes().startswith(starts.get(file.suffix, b"<")), file
        assert "<svg" in file.read_text(encoding="utf-8") if file.suffix == ".svg" else True


@pytest.mark.slow
def test_what_is_said_is_what_was_measured(paged: Ran) -> None:
    out, result = paged
    made = opsmith.Benchmark.from_json((out / "involution.json").read_text(encoding="utf-8"))
    largest = max((case for case in made.cases if case.role == "size"), key=lambda case: case.elements)
    ratio = largest.ratio("native", "both")
    assert ratio is not None
    assert result.passed
    assert result.headline.startswith(f"3 pages; involution takes {ratio.median:.2f} of the time")
    page = Reader((out / "pages" / "opsmith-involution.html").read_text(encoding="utf-8")).text
    assert "not benchmarked" not in page
    assert largest.label in page


def test_the_graph_of_the_example_has_its_names_and_what_is_saved(drawn: Ran) -> None:
    text = (drawn[0] / "example-graph.svg").read_text(encoding="utf-8")
    for name in ("opsmith::mul", "opsmith::add", "w", "b", "x"):
        assert re.search(rf">{name}<", text), name


def test_the_curves_are_those_of_the_stages() -> None:
    plane, loss, accuracy = learning_curves(LINE, DIGITS).axes
    assert [[*each.get_ydata()] for each in plane.lines] == [[4.0, 1.0, 0.1]]
    assert [*loss.lines[0].get_ydata()] == [2.0, 0.5]
    assert [*accuracy.lines[0].get_ydata()] == [50.0, 98.0]
    assert {*accuracy.lines[1].get_ydata()} == {97.0}


@pytest.mark.slow
def test_the_index_shows_the_pictures_and_links_every_file(paged: Ran) -> None:
    out, paged_result = paged
    drawn_result = run_stage(pictures, out)[1]
    result = replace(drawn_result, files=(*drawn_result.files, *paged_result.files))

    def again(context: TourContext) -> StageResult:
        return result

    console = Console(file=io.StringIO(), width=200)
    run_tour(TourContext(out, torch.device("cpu"), console), [TourStage("pictures", "draw <it> all", again)])
    text = (out / "index.html").read_text(encoding="utf-8")
    read = Reader(text)
    assert read.open == []
    assert "The tour of opsmith ✓ passed" in read.text
    assert f"draw <it> all ✓ passed {result.headline}" in read.text
    links = {each for each in read.every("href") if each != "data:,"}
    listed = {file.relative_to(out).as_posix() for file in result.files}
    assert {name for name in listed if "/" not in name} | {"pages/index.html", "summary.json"} == links
    assert all((out / each).is_file() for each in links)
    shown = [base64.b64decode(each.partition(",")[2]) for each in read.every("src")]
    assert shown == [
        (out / name).read_bytes()
        for name in ("example-graph.svg", "curves.svg", "involution-roofline.svg", "digits-graph.svg")
    ]
    assert isinstance(console.file, io.StringIO)
    assert f"results: {out / 'index.html'}" in console.file.getvalue()


def test_a_tour_that_failed_says_so_in_its_index(tmp_path: Path) -> None:
    def fail(context: TourContext) -> StageResult:
        return StageResult(False, "two of three", {}, (write_json(context.out / "figures.json", {}),))

    passed = run_tour(
        TourContext(tmp_path, torch.device("cpu"), Console(file=io.StringIO())),
        [TourStage("one", "do one", fail)],
    )
    assert not passed
    text: Any = Reader((tmp_path / "index.html").read_text(encoding="utf-8")).text
    assert "✗ FAILED in 0 s on cpu" in text
    assert "do one ✗ failed two of three" in text
    assert "figures figures.json, summary.json" in text
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["passed"] is False
