"""`opsmith page`: where it writes, what it takes of earlier runs, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from html_reader import Reader
from typer.testing import Result

from opsmith.benchmarking import Benchmark
from opsmith.checking import Outcome, Report

Run = Callable[..., Result]
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.pages.content.exports_of", lambda operator: ())


@pytest.fixture
def checked(tmp_path: Path, space: str) -> Path:
    """Reports that no check has to make first, as `opsmith check --json` prints them."""
    outcomes = (Outcome("forward", "passed"), Outcome("gradient", "passed"))
    reports = [Report(f"{space}::{name}", outcomes, seed=0).to_dict() for name in ("right", "wrong")]
    file = tmp_path / "report.json"
    file.write_text(
        json.dumps({"schema": 4, "passed": True, "reports": reports, "unchecked": [], "interrupted": False})
    )
    return file


def test_a_page_of_one_operator(
    opsmith: Run, write: Write, tmp_path: Path, space: str, checked: Path
) -> None:
    page = tmp_path / "right.html"
    done = opsmith("page", f"{write()}:right", "-o", str(page), "--checked", str(checked))
    assert (done.exit_code, done.stdout) == (0, f"{page}\n"), done.stderr
    assert f"{space}::right ✓" not in done.stderr
    assert f"{space}::right {write()}:6".split()[0] in Reader(page.read_text(encoding="utf-8")).text


@pytest.mark.slow
def test_a_folder_for_all_of_a_file(
    opsmith: Run, write: Write, tmp_path: Path, space: str, checked: Path
) -> None:
    folder = tmp_path / "pages"
    done = opsmith("page", str(write()), "-o", str(folder), "--checked", str(checked))
    assert (done.exit_code, done.stdout) == (0, f"{folder / 'index.html'}\n"), done.stderr
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        ["index.html", f"{space}-right.html", f"{space}-wrong.html"]
    )


@pytest.mark.slow
def test_what_is_not_known_is_checked_and_the_status_is_that_of_the_writing(
    opsmith: Run, write: Write, tmp_path: Path, space: str
) -> None:
    page = tmp_path / "wrong.html"
    done = opsmith("page", f"{write()}:wrong", "-o", str(page), "--quick")
    assert done.exit_code == 0, done.stderr
    assert f"{space}::wrong" in (text := Reader(page.read_text(encoding="utf-8")).text)
    assert "✗ FAILED: gradient" in text
    assert "with seed 0 and quick effort" in text


@pytest.mark.slow
def test_benchmarks_of_before(opsmith: Run, write: Write, tmp_path: Path, space: str, checked: Path) -> None:
    before = tmp_path / "before.json"
    made = Benchmark(f"{space}::right", "quick", 0, 1, {"processor": "the one of before"}, {}, (), ())
    before.write_text(
        json.dumps({"schema": 2, "benchmarks": [made.to_dict()], "verdicts": [], "unmeasured": []})
    )
    page = tmp_path / "right.html"
    arguments = ["--checked", str(checked), "--benchmarked", str(before)]
    done = opsmith("page", f"{write()}:right", "-o", str(page), *arguments)
    assert done.exit_code == 0, done.stderr
    assert "1 thread, the one of before" in Reader(page.read_text(encoding="utf-8")).text


@pytest.mark.parametrize("option", ["--checked", "--benchmarked"])
def test_a_file_about_others_is_refused(
    opsmith: Run, write: Write, tmp_path: Path, space: str, option: str
) -> None:
    file = tmp_path / "others.json"
    if option == "--checked":
        file.write_text(Report("others::one", (), seed=0).to_json())
    else:
        file.write_text(Benchmark("others::one", "quick", 0, 1, {}, {}, (), ()).to_json())
    done = opsmith("page", f"{write()}:right", "-o", str(tmp_path / "a.html"), option, str(file))
    what = {"--checked": "report", "--benchmarked": "benchmark"}[option]
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"opsmith: `{file}` has no {what} of these operators",
        f"  argument: {option}",
        f"  expected: one of `{space}::right`",
        "  got: `others::one`",
        f"  hint: name a file with a {what} of these operators, or leave the option out",
        "  more: opsmith rule UsageError",
    ]


@pytest.mark.parametrize(
    ("option", "command"),
    [("--checked", "opsmith check ... --json >"), ("--benchmarked", "opsmith benchmark ... -o")],
)
def test_a_file_that_cannot_be_read_is_told_with_what_writes_it(
    opsmith: Run, write: Write, tmp_path: Path, option: str, command: str
) -> None:
    done = opsmith("page", f"{write()}:right", "-o", str(tmp_path / "a.html"), option, str(tmp_path / "no"))
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        f"opsmith: `{tmp_path}/no` cannot be read",
        f"  argument: {option}",
        f"  expected: a file that `{command} FILE` writes",
        "  got: No such file or directory",
        f"  hint: make this file first: `{command} {tmp_path}/no`",
        "  more: opsmith rule UsageError",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick", "--thorough"], "`--quick` and `--thorough` contradict each other"),
        (["--benchmark", "--benchmarked", "x.json"], "`--benchmark` measures, but `--benchmarked` reads"),
    ],
)
def test_options_that_exclude_one_another(
    opsmith: Run, write: Write, tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = opsmith("page", f"{write()}:right", "-o", str(tmp_path / "a.html"), *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"opsmith: {said}")
    assert not (tmp_path / "a.html").exists()


def test_a_file_without_an_operator_and_a_folder_that_is_not_there(
    opsmith: Run, write: Write, tmp_path: Path
) -> None:
    empty = write("import torch\n", "empty_file.py")
    done = opsmith("page", str(empty), "-o", str(tmp_path / "pages"))
    assert done.exit_code == 2
    assert "declares no operator" in done.stderr
    done = opsmith("page", f"{write()}:right", "-o", str(tmp_path / "none" / "a.html"))
    assert done.exit_code == 2
    assert f"no file can be written to `{tmp_path}/none/a.html`" in done.stderr
