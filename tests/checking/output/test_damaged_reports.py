"""A damaged report is read as it stands there, or refused by one error of ours; nothing else is raised."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from damaged_documents import BRACKETS, damaged, refused_rightly

from opsmith import errors
from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.output.html import page
from opsmith.checking.report import read_reports

FILE = Path("folder/before.json")
SEEDS = range(400)
DERIVED = {"passed", "errors", "warnings", "limits", "seconds", "compile_seconds", "word"}
"""Keys that a report computes from its outcomes."""
ADDED: dict[str, Any] = {"declared": None, "unverified": [], "kernels": []}
"""Keys that were added within a version, with the value of a report, or an outcome, that lacks them."""

EVIDENCE = {"got": math.nan, "index": (2, 0), "also fits": {"scale": {"factor": -1.0, "error": 3e-16}}}
FAILURES = (
    Failure("gradient", "x", "sign", "it has the other sign", "file.py:3", EVIDENCE, "boom()"),
    Failure(
        "gradient", "y", "precision", "it rounds", dtypes=("float16",), severity="warning", accepted="so"
    ),
)
REPORT = Report(
    "demo::op",
    (
        Outcome(
            "forward",
            "passed",
            seconds=0.25,
            notes=("bfloat16 was left out",),
            dtypes=("float32",),
            kernels=(0,),
        ),
        Outcome("gradient", "failed", seconds=1.0, failures=FAILURES),
        Outcome("second_order", "skipped", "left out on request", left_out=True),
        Outcome("compile", "passed", seconds=12.0, compiles=True),
    ),
    seed=3,
    environment={"torch": "2.13.0"},
    effort="quick",
    remarks=("its arguments were guessed",),
    inputs=("x [3]",),
    loading=2.5,
    unverified=("cuda",),
)


UNCHECKED = [{"operator": None, "file": "file.py", "message": "no samples"}]


def kept(written: Any, read: Any) -> bool:
    """Return True if all that a report wrote stands in the document that it was read from."""
    if isinstance(written, dict):
        there = {**ADDED, **read}
        return all(kept(value, there[key]) for key, value in written.items() if key not in DERIVED)
    if isinstance(written, list):
        return len(written) == len(read) and all(map(kept, written, read))
    return bool(written == read)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["one", "several", "command"])
def test_damaged_reports_are_read_right_or_refused(form: str) -> None:
    other = {**REPORT.to_dict(), "operator": "demo::other"}
    documents = {
        "one": REPORT.to_dict(),
        "several": [REPORT.to_dict(), other],
        "command": {"schema": 4, "passed": False, "reports": [REPORT.to_dict(), other]}
        | {"unchecked": UNCHECKED, "interrupted": False},
    }
    assert all(str(each) for each in read_reports(json.dumps(documents[form])).values())
    right = refused = 0
    for seed in SEEDS:
        text = damaged(documents[form], seed)
        try:
            reports = read_reports(text, FILE)
        except errors.ReportFormatError as error:
            refused += refused_rightly(error, FILE, "opsmith check")
            continue
        document = json.loads(text)
        entries = document.get("reports", [document]) if isinstance(document, dict) else document
        for entry in entries:
            report = reports[entry["operator"]]
            if sum(each["operator"] == entry["operator"] for each in entries) == 1:
                assert kept(json.loads(report.to_json()), entry), seed
            assert str(report).encode(), seed
        assert page([*reports.values()]).encode(), seed
        right += 1
    sys.stdout.write(f"{len(SEEDS)} damaged: {right} read right, {refused} refused\n")
    assert right > 20
    assert right + refused == len(SEEDS)


def test_a_report_from_before_a_key_was_added_is_read() -> None:
    old = {key: value for key, value in REPORT.to_dict().items() if key not in ADDED}
    old["outcomes"] = [
        {key: value for key, value in outcome.items() if key not in {*ADDED, "word"}}
        for outcome in old["outcomes"]
    ]
    unchecked = [{"operator": None, "message": "no samples"}]
    command = {"schema": 4, "passed": False, "reports": [old], "unchecked": unchecked, "interrupted": False}
    (report,) = read_reports(json.dumps(command)).values()
    assert report == replace(REPORT, unverified=(), outcomes=report.outcomes)
    assert len(report.outcomes) == len(REPORT.outcomes)
    assert report.outcomes[0].kernels == ()


@pytest.mark.parametrize("text", ["[" * BRACKETS, '{"a":' * BRACKETS], ids=["lists", "objects"])
def test_a_hundred_thousand_brackets_are_refused(text: str) -> None:
    with pytest.raises(errors.ReportFormatError) as raised:
        read_reports(text)
    assert raised.value.expected == "JSON, not nested too deeply"
    assert "recursion" in (raised.value.got or "")


def test_evidence_that_is_too_deep_to_be_shown_is_refused() -> None:
    """Its parser takes it, and its text would exceed the stack."""
    deep: Any = "bottom"
    for _ in range(400):
        deep = {"deeper": deep}
    read = REPORT.to_dict()
    read["outcomes"][1]["failures"][0]["evidence"]["deep"] = deep
    text = json.dumps(read)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # torch's compiler raises it for good
    try:
        with pytest.raises(errors.ReportFormatError, match="is not a report"):
            read_reports(text)
    finally:
        sys.setrecursionlimit(limit)


def test_the_error_names_file_place_and_hint(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    read = REPORT.to_dict()
    read["outcomes"][2]["property"] = 3
    with pytest.raises(errors.ReportFormatError) as raised:
        read_reports(json.dumps(read), file)
    assert raised.value.message().splitlines() == [
        f"`{file}` is not a report that this version of opsmith wrote",
        "  expected: a string: Its name, as `--only` and `--skip` take it.",
        "  got: int 3",
        f"  where: {file}: $.outcomes[2].property",
        "  hint: check again with this version: `opsmith check ... --json > FILE`, or `Report.to_json()`",
    ]
