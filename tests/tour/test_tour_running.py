"""The tour as a whole: its stages, its summary, its files, its exit status."""

from __future__ import annotations

import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import opsmith
import opsmith.tour
from opsmith import errors
from opsmith.checking import Outcome, Report
from opsmith.checking.report import read_reports
from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.cli.app import app
from opsmith.core.output_file import replacing
from opsmith.tour import STAGES, StageResult, TourContext, TourStage, operators, run_tour
from opsmith.tour.stage import write_json


def context(out: Path) -> TourContext:
    return TourContext(out, torch.device("cpu"), Console(file=io.StringIO(), width=120))


def stage(name: str, passed: bool) -> TourStage:
    def run(context: TourContext) -> StageResult:
        path = write_json(context.out / f"{name}.json", {})
        return StageResult(passed, f"{name} is done", {"figure": 3}, (path,))

    return TourStage(name, f"do {name}", run)


def test_stages() -> None:
    assert [stage.name for stage in STAGES] == [
        "checks",
        "linear",
        "pages",
        "digits",
        "pictures",
        "onnx",
        "decoder",
    ]


@pytest.mark.parametrize("second", [True, False], ids=["all_pass", "one_fails"])
def test_summary(tmp_path: Path, second: bool) -> None:
    given = context(tmp_path / "new" / "folder")
    assert run_tour(given, [stage("one", True), stage("two", second)]) is second
    written = json.loads((given.out / "summary.json").read_text())
    assert written["passed"] is second
    assert [one["passed"] for one in written["stages"]] == [True, second]
    assert written["stages"][0] | {"seconds": 0} == {
        "name": "one",
        "title": "do one",
        "passed": True,
        "headline": "one is done",
        "seconds": 0,
        "details": {"figure": 3},
        "files": ["one.json"],
    }
    assert written["versions"]["opsmith"] == opsmith.__version__
    assert isinstance(given.console.file, io.StringIO)
    printed = given.console.file.getvalue()
    assert "do two" in printed
    assert ("failed" in printed) is not second
    assert str(given.out) in printed


def test_a_missing_package_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sklearn" else find_spec(name, *rest)
    )
    with pytest.raises(errors.MissingExtraError) as caught:
        run_tour(context(tmp_path))
    assert caught.value.message() == (
        "the tour's stage `digits` needs the package `sklearn`\n"
        "  got: no module named 'sklearn'\n"
        "  hint: pip install '.[tour]' in a checkout of opsmith"
    )
    assert not list(tmp_path.iterdir())


def test_an_interrupted_file_leaves_nothing(tmp_path: Path) -> None:
    path = write_json(tmp_path / "figures.json", {"old": 1})

    def interrupted() -> None:
        with replacing(path) as temporary:
            temporary.write_text('{"new": ')
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_json_takes_finite_numbers_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "figures.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_thread_count_is_restored() -> None:
    @thread_count(1)
    def fails() -> None:
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError

    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.get_num_threads() == before


def test_each_check_prints_its_line_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = context(tmp_path)
    printed: list[list[str]] = []

    def check(operator: Any, *, skip: Any, **options: Any) -> Report:
        assert isinstance(given.console.file, io.StringIO)
        printed.append(given.console.file.getvalue().splitlines())
        outcomes = [Outcome(name, "skipped", "left out on request", left_out=True) for name in skip]
        return Report(operator.name, (Outcome("forward", "passed"), Outcome("vmap", "skipped"), *outcomes), 0)

    monkeypatch.setattr(operators, "check", check)
    operators.run(given)
    assert [len(lines) for lines in printed] == [*range(1, 1 + len(operators.OPERATORS))]
    assert printed[0] == [
        "8 operators, a line for each when its check ends; left out by the tour, because they compile more "
        "kernels, for GPUs: cuda, resources"
    ]
    for operator, line in zip(operators.OPERATORS, printed[-1][1:], strict=False):
        assert line.startswith(f"{operator.name} ")
        assert "properties:  1 passed,  1 skipped  " in line
    for report in read_reports((tmp_path / "checks.json").read_text()).values():
        assert report.omissions() == f"{operators.LEFT_OUT}: cuda, resources"


# torch warns of its own deprecated names when it first loads the formulas of forward mode.
@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
def test_checks_tell_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @opsmith.operator("tests_tour::twice")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.gradients(x=lambda grad: 3 * grad)
    twice.samples(lambda make: [(make(3),)])
    monkeypatch.setattr(operators, "OPERATORS", (opsmith.ops.add, twice))
    given = context(tmp_path)
    result = operators.run(given)
    assert not result.passed
    assert result.headline.startswith("1 of 2 operators passed a quick check; to check them thoroughly: ")
    assert all(report["effort"] == "quick" for report in json.loads((tmp_path / "checks.json").read_text()))
    assert result.details == {"passed": ["opsmith::add"], "failed": ["tests_tour::twice"]}
    reports = json.loads((tmp_path / "checks.json").read_text())
    assert [report["passed"] for report in reports] == [True, False]
    assert isinstance(given.console.file, io.StringIO)
    assert "tests_tour::twice: the gradient of `x`" in given.console.file.getvalue()


@pytest.mark.parametrize(
    ("answer", "status"), [(True, 0), (False, 1), (KeyboardInterrupt(), 130)], ids=["pass", "fail", "ctrl_c"]
)
def test_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, status: int) -> None:
    seen: list[TourContext] = []

    def run_tour(context: TourContext) -> bool:
        seen.append(context)
        if isinstance(answer, BaseException):
            raise answer
        return bool(answer)

    monkeypatch.setattr(opsmith.tour, "run_tour", run_tour)
    arguments = ["tour", "--out", str(tmp_path), "--linear-steps", "7", "--digits-epochs", "2", "--seed", "5"]
    arguments += ["--decoder-seconds", "0.5"]
    assert CliRunner().invoke(app, arguments).exit_code == status
    (given,) = seen
    assert (given.out, given.linear_steps, given.digits_epochs, given.seed) == (tmp_path, 7, 2, 5)
    assert given.decoder_seconds == 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
def test_the_whole_tour(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tour", "--out", str(tmp_path)])
    assert done.exit_code == 0
    # The second process runs three stages from the start; what they print stands below their titles.
    order = [f"1. {STAGES[0].title}", "to check them thoroughly", f"2. {STAGES[1].title}", "w1 "]
    order += [f"3. {STAGES[2].title}", f"4. {STAGES[3].title}", "read right", "opsmith::involution: kernel"]
    order += [f"5. {STAGES[4].title}"]
    at = [done.output.index(each) for each in order]
    assert at == sorted(at)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["passed"]
    files = {file for stage in written["stages"] for file in stage["files"]}
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files | {"summary.json", "index.html"} == there
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    linked = set(re.findall(r'href="([^"#]+)"', index)) - {"data:,"}
    assert {name for name in files if "/" not in name} | {"pages/index.html", "summary.json"} == linked
    assert index.count("<img ") == 4
