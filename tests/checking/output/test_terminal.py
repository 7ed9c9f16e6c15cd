"""The report in colour says what the plain one says; without rich an error names the extra."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from html_reader import Reader
from rich.console import Console

from opsmith import errors
from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.output.html import page
from opsmith.checking.output.terminal import rendered
from opsmith.checking.report import folded

FAILURE = Failure(
    "gradient",
    "x",
    "sign",
    "the gradient of `x` is wrong",
    "file.py:3",
    {"spread": 1 / 3, "also fits": {"scale": {"factor": -1.0}}},
    "import torch\nboom()",
)


def text(report: Report, width: int = 100) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(rendered(report))
    return file.getvalue()


def test_a_failure_has_a_panel_with_all_of_it() -> None:
    outcomes = (
        Outcome("forward", "passed", seconds=0.25, notes=("bfloat16 was [left] out",)),
        Outcome("gradient", "failed", seconds=1.0, failures=(FAILURE,)),
        Outcome("effects", "failed", failures=(Failure("effects", "x", "raises", "no", follows="gradient"),)),
        Outcome("second_order", "skipped", "nobody needed it"),
        Outcome("memory", "skipped", "nobody needed it"),
    )
    lines = text(Report("demo::op", outcomes, 0, remarks=("guessed",))).splitlines()
    lines = [line.rstrip() for line in lines]
    assert lines[0] == "demo::op: FAILED: gradient, effects; 1 error"
    assert lines[1].startswith("gradient of `x`: sign ──")
    assert lines[2:11] == [
        "  the gradient of `x` is wrong",
        "  where: file.py:3",
        "  cause: The gradient has the wrong sign.",
        "  fix: Negate the formula, or swap the two operands of its subtraction.",
        "",
        "  spread      0.333333",
        "  also fits",
        "    scale",
        "      factor  -1",
    ]
    assert lines[11:15] == ["", "import torch", "boom()", "  more: opsmith rule sign"]
    assert lines[16:18] == ["effects of `x`: raises, which follows from `gradient`", "  note: guessed"]
    assert lines[18].split(maxsplit=4) == ["forward", "passed", "0.25", "s", "bfloat16 was [left] out"]
    assert lines[21:] == [
        "  skipped: 2",
        "    second_order, memory: nobody needed it",
        "  1.25 s; seed 0, default effort",
    ]


def test_the_first_screen_shows_the_first_error_its_line_its_cause_and_its_fix(tmp_path: Path) -> None:
    source = tmp_path / "file.py"
    source.write_text("one = 1\ntwo = 2\n")
    skipped = tuple(Outcome(f"property{at}", "skipped", f"reason {at}") for at in range(30))
    failing = replace(FAILURE, where=f"{source}:2")
    limit = Failure("vmap", None, "raises", "it raises", severity="limit")
    outcomes = (
        Outcome("vmap", "passed", failures=(limit,)),
        *skipped,
        Outcome("gradient", "failed", failures=(failing,)),
    )
    report = Report("demo::op", outcomes, 0, remarks=("a note",) * 30)
    for whole in (text(report, 80), str(report), Reader(page([report])).text):
        screen = whole[:900] if whole.startswith(" ") else "\n".join(whole.splitlines()[:24])
        for words in ("the gradient of `x` is wrong", "two = 2", "the wrong sign.", "Negate the formula"):
            assert words in screen or words.replace("`", "") in screen, words
        assert whole.index("Negate the formula") < whole.index("it raises") < whole.index("reason 0")


def test_compile_checks_come_last_and_their_time_stands_apart() -> None:
    outcomes = (
        Outcome("compile", "passed", seconds=12.5, compiles=True),
        Outcome("forward", "passed", seconds=0.5),
        Outcome("gradient", "passed", seconds=0.25),
    )
    report = Report("demo::op", outcomes, 3, effort="thorough")
    lines = text(report).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["forward", "gradient", "compile"]
    closing = "  0.75 s; compiling: 12.50 s; seed 3, thorough effort"
    assert lines[4] == closing
    assert str(report).splitlines()[4] == closing


def test_code_is_broken_so_that_it_fits_and_still_runs() -> None:
    numbers = [[0.1234567890123 + i, 1e-30, -3.0] for i in range(6)]
    text_of_it = repr("a word (in brackets, no code) " * 4)
    code = f"numbers = {numbers}\ntext = {text_of_it}  # a comment, at the end of it"
    made: dict[str, object] = {}
    exec(folded(code, 60), made)
    assert made["numbers"] == numbers
    assert made["text"] == "a word (in brackets, no code) " * 4
    lines = folded(code, 60).splitlines()
    assert len(lines) == 5
    assert all(len(line) <= 60 for line in lines[:-1])
    failing = Failure("gradient", "x", "sign", "m", replay=code)
    shown = text(Report("demo::op", (Outcome("gradient", "failed", failures=(failing,)),), 0), width=60)
    first = shown[shown.index("numbers = ") :]
    exec(first[: first.index("text = ")], made)
    assert made["numbers"] == numbers


@pytest.mark.parametrize("code", ["x = 'open", "f(a,", "x = 1", "    f(aaaaaaaaaaaaaaaaaaaaa)"])
def test_what_cannot_be_broken_stays_as_it_is(code: str) -> None:
    assert folded(code, 4) == code


def test_a_report_without_remarks_has_three_columns() -> None:
    lines = text(
        Report("demo::op", (Outcome("forward", "passed"), Outcome("gradient", "passed")), 0)
    ).splitlines()
    assert lines[0] == "demo::op: passed"
    assert lines[1].split() == ["forward", "passed", "0.00", "s"]


def test_without_rich_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opsmith.checking.output.terminal")
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(errors.MissingExtraError) as raised:
        __import__("opsmith.checking.output.terminal")
    assert raised.value.message().splitlines() == [
        "reports in colour need the package `rich`",
        "  got: no module named 'rich'",
        "  hint: pip install '.[cli]' in a checkout of opsmith; or print(report), which needs no "
        "extra package",
    ]
