"""`opsmith check --format`: each format on a file with three faults, and on what cannot be checked."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
from three_faults import FAST, FAULTS, TEXT
from typer.testing import Result

from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.output.annotations import Unchecked, lines, workflow_commands
from opsmith.checking.output.junit import junit
from opsmith.checking.output.sarif import sarif

Run = Callable[..., Result]
Write = Callable[..., Path]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def reports(write: Write, space: str) -> tuple[Path, list[Report]]:
    """The file with three faults, and reports as a check of it gives them."""
    file = write(TEXT)
    return file, [
        Report(
            f"{space}::{name}",
            (Outcome("gradient", "failed", seconds=0.5, failures=(failure(file, *fault),)),),
            seed=0,
        )
        for name, fault in FAULTS.items()
    ]


def failure(file: Path, line: int, cause: str, **more: Any) -> Failure:
    return Failure("gradient", "x", cause, "it is 1%,\nand not: 2", f"{file}:{line}", **more)


def test_one_check_gives_every_format(
    opsmith: Run, write: Write, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(TEXT)
    monkeypatch.chdir(tmp_path)
    wanted = ("text", "github", "lines=found.txt", "json=check.json", "sarif=check.sarif", "junit=check.xml")
    done = opsmith("check", file.name, *FAST, *(word for each in wanted for word in ("--format", each)))
    assert done.exit_code == 1, done.output
    assert done.stderr.splitlines() == [
        "opsmith: the list is in found.txt",
        "opsmith: the JSON is in check.json",
        "opsmith: the SARIF is in check.sarif",
        "opsmith: the JUnit XML is in check.xml",
    ]
    assert "3 operators: 0 passed, 3 not passed" in done.stdout
    right = {(str(file), line, cause) for line, cause in FAULTS.values()}
    assert {(path, line, title.split(": ")[-1]) for path, line, title, _ in commands(done.stdout)} == right
    found = re.findall(
        r"^(.+\.py):(\d+): error: \S+: [^:]+: ([a-z-]+): ", Path("found.txt").read_text(), re.M
    )
    assert {(str(tmp_path / path), int(line), cause) for path, line, cause in found} == right
    assert results_of(Path("check.sarif").read_text()) == right
    cases = ElementTree.parse("check.xml").findall(".//testcase[failure]")
    assert {each.attrib["classname"] for each in cases} == {f"{space}::{name}" for name in FAULTS}
    texts = "".join(each[0].text or "" for each in cases)
    assert all(f"where: {path}:{line}\n" in texts for path, line, _ in right)
    declared = [each["declared"] for each in json.loads(Path("check.json").read_text())["reports"]]
    lines_of = [int(each.removeprefix(f"{file}:")) for each in declared]
    assert [TEXT.splitlines()[line - 1] for line in lines_of] == [
        f'@opsmith.operator("{{space}}::{name}")' for name in FAULTS
    ]


def commands(text: str) -> list[tuple[str, int, str, str]]:
    """File, line, title and message of each workflow command, as the runner of GitHub Actions reads them."""
    found = re.findall(r"^::error file=([^,]+),line=(\d+),title=([^,:]+)::(.*)$", text, re.M)
    return [(unquote(path), int(line), unquote(title), unquote(words)) for path, line, title, words in found]


def results_of(text: str) -> set[tuple[str, int, str]]:
    """File, line and rule of each result; what SARIF 2.1.0 requires of its objects is asserted on the way."""
    log = json.loads(text)
    assert log["version"] == "2.1.0"
    found = set()
    for run in log["runs"]:
        driver = run["tool"]["driver"]
        assert driver["name"] == "opsmith"
        ids = [rule["id"] for rule in driver["rules"]]
        assert len(set(ids)) == len(ids)
        assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
        assert all(isinstance(each["executionSuccessful"], bool) for each in run["invocations"])
        for each in run["results"]:
            assert each["message"]["text"]
            assert each["level"] in {"none", "note", "warning", "error"}
            assert ids[each["ruleIndex"]] == each["ruleId"]
            assert all(isinstance(value, str) for value in each["partialFingerprints"].values())
            assert {one["kind"] for one in each.get("suppressions", ())} <= {"inSource", "external"}
            (location,) = each["locations"]
            place = location["physicalLocation"]
            assert place["region"]["startLine"] >= 1
            uri = urlsplit(place["artifactLocation"]["uri"])
            assert uri.scheme == "file"
            found.add((unquote(uri.path), place["region"]["startLine"], each["ruleId"]))
    return found


def test_workflow_commands_escape_what_ends_them(reports: tuple[Path, list[Report]], space: str) -> None:
    text = workflow_commands(reports[1], [])
    assert text.splitlines()[0] == (
        f"::error file={reports[0]},line=12,title={space}%3A%3Asquare%3A gradient of `x`%3A sign"
        "::it is 1%25,%0Aand not: 2%0Amore: opsmith rule sign"
    )
    title, message = commands(text)[0][2:]
    assert title == f"{space}::square: gradient of `x`: sign"
    assert message == "it is 1%,\nand not: 2\nmore: opsmith rule sign"


def test_lines_are_one_for_each_finding(reports: tuple[Path, list[Report]]) -> None:
    file, found = reports
    text = lines(found, [])
    assert len(text.splitlines()) == 3
    assert text.splitlines()[0] == (
        f"{file}:12: error: {found[0].operator}: gradient of `x`: sign: it is 1%, and not: 2; "
        "more: opsmith rule sign"
    )


@pytest.mark.parametrize(
    ("severity", "command", "word", "level"),
    [("error", "error", "error", "error"), ("warning", "warning", "warning", "warning"),
     ("limit", "notice", "note", "note")],
)  # fmt: skip
def test_severities_have_the_words_of_each_format(
    write: Write, severity: Any, command: str, word: str, level: str
) -> None:
    given = failure(write(TEXT), 3, "sign", severity=severity)
    report = Report("demo::op", (Outcome("gradient", "passed", failures=(given,)),), seed=0)
    assert workflow_commands([report], []).startswith(f"::{command} file=")
    assert f":3: {word}: demo::op: " in lines([report], [])
    assert json.loads(sarif([report]))["runs"][0]["results"][0]["level"] == level


def test_what_is_accepted_is_a_suppressed_result_and_no_annotation(write: Write) -> None:
    given = failure(write(TEXT), 3, "sign", accepted="we know")
    outcomes = (Outcome("forward", "passed"), Outcome("gradient", "passed", failures=(given,)))
    report = Report("demo::op", outcomes, seed=0)
    assert workflow_commands([report], []) == lines([report], []) == ""
    (result,) = json.loads(sarif([report]))["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "external", "justification": "we know"}]
    counted = Report(
        report.operator, (Outcome("gradient", "failed", failures=(failure(write(TEXT), 3, "sign"),)),), 0
    )
    (new,) = json.loads(sarif([counted]))["runs"][0]["results"]
    assert new["partialFingerprints"] == result["partialFingerprints"]


def test_what_another_failure_explains_is_left_out(write: Write) -> None:
    file = write(TEXT)
    both = (failure(file, 3, "sign"), failure(file, 4, "raises", follows="gradient"))
    report = Report("demo::op", (Outcome("gradient", "failed", failures=both),), seed=0)
    assert results_of(sarif([report])) == {(str(file), 3, "sign")}
    assert len(lines([report], []).splitlines()) == 1


def test_a_finding_without_a_line_stands_at_the_declaration(write: Write) -> None:
    file = write(TEXT)
    given = Failure("forward", None, "raises", "no", "aten.mul.Tensor")
    report = Report("demo::op", (Outcome("forward", "failed", failures=(given,)),), 0, declared=f"{file}:7")
    assert results_of(sarif([report])) == {(str(file), 7, "raises")}


def test_a_report_that_passes_nothing_is_a_finding(write: Write) -> None:
    """`forward` passed and no gradient was run: the exit status is 1."""
    file = write(TEXT)
    outcomes = (Outcome("forward", "passed"), Outcome("gradient", "skipped", "no sample requires one"))
    report = Report("demo::op", outcomes, 0, declared=f"{file}:7")
    assert lines([report], []) == (
        f"{file}:7: error: demo::op: not passed: NOT PASSED: gradient could not be checked\n"
    )
    case = ElementTree.fromstring(junit([report])).find(".//failure")
    assert case is not None
    assert case.attrib["message"] == "the property could not be checked: no sample requires one"


def test_what_could_not_be_checked_stands_at_the_line_that_raises(write: Write, tmp_path: Path) -> None:
    file = write(TEXT)
    raised = f'it cannot be imported\n  got: \n      File "{file}", line 5, in <module>\n    NameError: x'
    unchecked = [
        Unchecked("demo::op", str(file), "there are no samples", f"{file}:7"),
        Unchecked(None, str(file), raised),
        Unchecked(None, str(file), "it has nothing"),
        Unchecked(None, "mypackage", "there is no module"),
    ]
    shown = lines([], unchecked).splitlines()
    assert shown[0] == f"{file}:7: error: demo::op: could not be checked: there are no samples"
    assert [line.partition(": error: ")[0] for line in shown[1:]] == [f"{file}:5", f"{file}:1", "opsmith"]
    assert workflow_commands([], unchecked[-1:]) == (
        "::error title=mypackage%3A could not be checked::there is no module\n"
    )
    (run,) = json.loads(sarif([], unchecked[:3]))["runs"]
    assert run["invocations"][0]["executionSuccessful"] is False
    assert results_of(sarif([], unchecked[:3])) == {(str(file), line, "not-checked") for line in (7, 5, 1)}
    suite = ElementTree.fromstring(junit([], unchecked))[0]
    assert suite.attrib["errors"] == suite.attrib["tests"] == "4"


def test_junit_counts_failures_skipped_and_passed(reports: tuple[Path, list[Report]]) -> None:
    file, found = reports
    warned = failure(file, 3, "precision", severity="warning")
    outcomes = (
        Outcome("forward", "passed", seconds=0.25),
        Outcome("gradient", "passed", seconds=0.5, failures=(warned,)),
        Outcome("vmap", "skipped", "it is slow\x00"),
        Outcome("opcheck", "skipped", "left out on request", left_out=True),
    )
    report = Report("demo::op", outcomes, seed=0)
    suite = ElementTree.fromstring(junit([*found, report]))[0]
    wanted = {"tests": "6", "failures": "3", "errors": "0", "skipped": "1", "time": "2.250"}
    assert {name: suite.attrib[name] for name in wanted} == wanted
    skipped = suite.find("testcase/skipped")
    assert skipped is not None
    assert skipped.attrib == {"type": "pytest.skip", "message": "it is slow\N{REPLACEMENT CHARACTER}"}
    strict = ElementTree.fromstring(junit([Report("demo::op", outcomes, seed=0, strict=True)]))[0]
    assert strict.attrib["failures"] == "1"


OUTCOMES = [
    ("passed", ()),
    ("skipped", ()),
    ("out", ()),
    ("failed", (Failure("gradient", "x", "sign", "it is wrong"),)),
    ("passed", (Failure("gradient", "x", "precision", "few digits", severity="warning"),)),
    ("passed", (Failure("gradient", "x", "raises", "no", severity="warning", follows="vmap"),)),
    ("passed", (Failure("gradient", "x", "precision", "few", severity="warning", accepted="known"),)),
    ("out", (Failure("gradient", None, "unrun", "no", evidence={"unverified": "k"}, severity="limit"),)),
]


@pytest.mark.parametrize("strict", [False, True])
def test_junit_has_a_failure_where_the_exit_status_is_one(strict: bool) -> None:
    ends = set()
    for chosen in itertools.product(OUTCOMES, repeat=3):
        outcomes = tuple(
            Outcome(name, "skipped" if status == "out" else status, "", 0.0, found, left_out=status == "out")  # type: ignore[arg-type]
            for name, (status, found) in zip(("forward", "gradient", "second_order"), chosen, strict=True)
        )
        report = Report("demo::op", outcomes, seed=0, strict=strict)
        failures = ElementTree.fromstring(junit([report]))[0].attrib["failures"]
        assert (failures == "0") is report.passed_as_asked, report
        ends.add(report.passed_as_asked)
    assert ends == {False, True}


ORDER = """\
import opsmith, torch

@opsmith.operator("{space}::order")
def order(x: torch.Tensor) -> torch.Tensor:
    return torch.argsort(x)

order.samples(lambda make: [(make(3),)])
"""


def test_of_a_property_that_cannot_run_text_status_and_junit_agree(
    opsmith: Run, write: Write, tmp_path: Path
) -> None:
    file = write(ORDER)
    xml = tmp_path / "found.xml"
    done = opsmith("check", str(file), "--quick", "--only", "second_order", "--format", f"junit={xml}")
    assert done.exit_code == 1, done.output
    assert "NOT PASSED: second_order could not be checked" in done.stdout
    (case,) = ElementTree.parse(xml).findall(".//testcase[failure]")
    assert case.attrib["name"] == "check"
    assert "second_order could not be checked" in case[0].attrib["message"]


@pytest.mark.slow
def test_junit_is_what_pytest_writes(write: Write, space: str, opsmith: Run, tmp_path: Path) -> None:
    file = write(TEXT)
    opsmith("check", str(file), *FAST, "--format", f"junit={tmp_path / 'ours.xml'}")
    options = ("-p", "no:cacheprovider", "--opsmith-effort", "quick", "-k", "forward or gradient")
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--opsmith", str(file), "--junitxml", "theirs.xml"],
        cwd=tmp_path,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    ours, theirs = (ElementTree.parse(tmp_path / name).getroot() for name in ("ours.xml", "theirs.xml"))

    def outline(root: ElementTree.Element) -> dict[tuple[str, str], list[str]]:
        operator = re.compile(r"\w+$")
        return {
            (operator.findall(each.attrib["classname"])[0], each.attrib["name"]): [
                part.tag for part in each if part.tag in ("failure", "error", "skipped")
            ]
            for each in root.iter("testcase")
            if each.attrib["name"] in ("forward", "gradient")
        }

    assert outline(ours) == outline(theirs)
    known = {each.tag: {*each.attrib} for each in theirs.iter()}
    for each in ours.iter():
        assert {*each.attrib} <= known[each.tag], each.tag


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--format", "sarf"), ("there is no format `sarf`", "argument: --format", "sarif, junit or html")),
        (("--format", "text=a.txt"), ("the text can only be written to stdout", "`--format github`")),
        (
            ("--format", "sarif", "--format", "text"),
            ("`sarif` and `text` are both to be written to stdout", "`--format sarif=check.sarif`"),
        ),
        (
            ("--json", "--format", "github"),
            ("`github` and `json` are both to be written to stdout", "`--format json=check.json`"),
        ),
        (("--json", "--format", "json"), ("`json` and `json` are both to be", "leave one out, or name")),
        (("--format", "lines", "--format", "lines"), ("written to stdout", "`--format lines=check.txt`")),
        (("--format", "text", "--format", "text"), ("written to stdout", "hint: leave one out\n")),
        (
            ("--format", "lines=a.txt", "--format", "json=./a.txt"),
            ("`lines` and `json` are both to be written to a.txt", "expected: one format for each file"),
        ),
        (("--html", "a.html", "--format", "html=a.html"), ("`html` and `html` are both to be",)),
        (("--format", "junit=none/a.xml"), ("argument: --format", "make the folder first")),
    ],
)
def test_formats_that_do_not_go_are_refused(
    opsmith: Run,
    write: Write,
    options: tuple[str, ...],
    says: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = opsmith("check", str(write(TEXT)), *options)
    assert done.exit_code == 2
    for words in says:
        assert words in done.stderr


@pytest.mark.parametrize("word", ["github", "lines", "json", "sarif", "junit"])
def test_a_refusal_is_written_in_the_format(opsmith: Run, word: str, tmp_path: Path) -> None:
    target = str(tmp_path / "none.py")
    done = opsmith("check", target, "--format", word, "--format", f"{word}={tmp_path / 'found'}")
    assert done.exit_code == 2
    assert done.stdout == (tmp_path / "found").read_text()
    assert "there is no file" in done.stdout
    assert "there is no file" in done.stderr
    if word == "json":
        assert json.loads(done.stdout).keys() == {"error"}


def test_a_refusal_of_a_file_stands_at_the_file(opsmith: Run, write: Write, tmp_path: Path) -> None:
    file = write("import torch\n")
    command = ("check", str(file), "--format", "lines", "--format", f"github={tmp_path / 'found'}")
    done = opsmith(*command)
    assert done.exit_code == 2
    assert done.stdout.startswith(f"{file}:1: error: {file}: could not be checked: `{file}` declares no")
    assert (tmp_path / "found").read_text().startswith(f"::error file={file},line=1,title=")
    whole = opsmith(*command, "-j", "0")
    assert whole.stdout.startswith("opsmith: error: opsmith check: could not be checked: `-j` takes")


def test_a_line_is_one_line_without_control_characters(write: Write, tmp_path: Path) -> None:
    file = write(TEXT, "two  spaces.py")
    report = Report(
        "demo::op\n\x1b[2J", (Outcome("gradient", "failed", failures=(failure(file, 12, "sign"),)),), seed=0
    )
    assert lines([report], []) == (
        f"{file}:12: error: demo::op ␛[2J: gradient of `x`: sign: it is 1%, and not: 2; "
        "more: opsmith rule sign\n"
    )
    named = Unchecked(None, "no\nfile\u2028.py", "there is\n  none\n")
    assert lines([], [named]) == "opsmith: error: no file .py: could not be checked: there is none\n"


@pytest.mark.parametrize("word", ["lines", "github", "json", "sarif", "junit"])
def test_a_file_name_that_is_no_utf_8_is_written(opsmith: Run, tmp_path: Path, word: str) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py")
    Path(name).write_text("import torch\n")
    done = opsmith("check", name, "--format", f"{word}={tmp_path / 'found'}")
    assert done.exit_code == 2, done.output
    assert "declares no operator" in (tmp_path / "found").read_text(encoding="utf-8")
