"""The report in colour says what the plain one says; without rich an error names the extra."""

import io
import sys

import pytest
from rich.console import Console

from opsmith import errors
from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.rendering import rendered

FAILURE = Failure(
    "gradient",
    "x",
    "sign",
    "the gradient of `x` is wrong",
    "file.py:3",
    {"spread": 1 / 3},
    "import torch\nboom()",
)


def text(report: Report) -> str:
    file = io.StringIO()
    Console(file=file, width=100).print(rendered(report))
    return file.getvalue()


def test_a_failure_has_a_panel_with_all_of_it() -> None:
    outcomes = (
        Outcome("forward", "passed", seconds=0.25, notes=("bfloat16 was [left] out",)),
        Outcome("gradient", "failed", seconds=1.0, failures=(FAILURE,)),
        Outcome("effects", "failed", failures=(Failure("effects", "x", "raises", "no", follows="gradient"),)),
        Outcome("second_order", "skipped", "nobody needed it"),
    )
    lines = [line.strip("│ ").rstrip() for line in text(Report("demo::op", outcomes, 0)).splitlines()]
    assert lines[0] == "demo::op: FAILED: gradient, effects"
    assert lines[1].split(maxsplit=4) == ["forward", "passed", "0.25", "s", "bfloat16 was [left] out"]
    assert lines[4].split(maxsplit=4) == ["second_order", "skipped", "0.00", "s", "nobody needed it"]
    assert "gradient of `x`: sign" in lines[5]
    for line in ("the gradient of `x` is wrong", "file.py:3", "spread  0.333333", "import torch", "boom()"):
        assert line in lines
    assert lines[-1] == "effects of `x`: raises, which follows from `gradient`"


def test_a_report_without_remarks_has_three_columns() -> None:
    lines = text(
        Report("demo::op", (Outcome("forward", "passed"), Outcome("gradient", "passed")), 0)
    ).splitlines()
    assert lines[0] == "demo::op: passed"
    assert lines[1].split() == ["forward", "passed", "0.00", "s"]


def test_without_rich_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opsmith.checking.rendering")
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(errors.MissingExtraError) as raised:
        __import__("opsmith.checking.rendering")
    assert str(raised.value).splitlines() == [
        "reports in colour need the package `rich`",
        "  got: no module named 'rich'",
        "  mend: pip install '.[cli]' in a checkout of opsmith; or print(report), which needs nothing",
    ]
