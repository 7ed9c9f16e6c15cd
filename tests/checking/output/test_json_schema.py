"""The JSON of a check agrees with the schema in the package, key by key."""

import importlib.resources
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.causes import CAUSES
from opsmith.checking.report import SCHEMA
from opsmith.cli.app import app

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TEXT = (importlib.resources.files("opsmith.checking") / "report.schema.json").read_text(encoding="utf-8")
RUN: dict[str, Any] = json.loads(TEXT)
REPORT: dict[str, Any] = {"$ref": "#/$defs/report", "$defs": RUN["$defs"]}
VALIDATORS = {
    name: jsonschema.Draft202012Validator(schema) for name, schema in {"run": RUN, "report": REPORT}.items()
}
ADDED = "no key in reports from before the key was added"
"""Words of the schema on a key that opsmith writes, and without which it reads reports."""
FAST = ("--only", "forward", "--only", "gradient")

FAILURE = Failure(
    "gradient",
    "x",
    "sign",
    "it has the other sign",
    "file.py:3",
    {
        "got": math.nan,
        "largest": -math.inf,
        "index": (2, 0),
        "of": 1 + 2j,
        "also fits": {"scale": {"factor": -1.0, "error": 3e-16}},
    },
    "boom()",
)
EVERYTHING = Report(
    "demo::op",
    (
        Outcome("forward", "passed", seconds=0.25, notes=("bfloat16 was left out",)),
        Outcome("gradient", "failed", seconds=1.0, failures=(FAILURE,)),
        Outcome(
            "effects", "failed", failures=(Failure("effects", None, "raises", "no", follows="gradient"),)
        ),
        Outcome("second_order", "skipped", "left out on request", left_out=True),
        Outcome("compile", "passed", seconds=12.0, compiles=True),
    ),
    seed=3,
    environment={"torch": "2.13.0"},
    effort="quick",
    remarks=("its arguments were guessed",),
)


def run(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["check", *arguments, "--json"], prog_name="opsmith")
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def pairs(read: Any, schema: dict[str, Any]) -> Iterator[tuple[set[str], set[str]]]:
    """The keys of every object and those that the schema describes, through all of a document."""
    schema = RUN["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(read, list):
        for each in read:
            yield from pairs(each, schema["items"])
    elif isinstance(read, dict) and "required" in schema:
        yield set(read), set(schema["properties"])
        added = {key for key, each in schema["properties"].items() if ADDED in each.get("description", "")}
        assert set(schema["required"]) == set(schema["properties"]) - added
        for name, each in read.items():
            yield from pairs(each, schema["properties"][name])


def test_the_schema_is_one_and_has_the_version_of_the_reports() -> None:
    jsonschema.Draft202012Validator.check_schema(RUN)
    assert RUN["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert {
        RUN["properties"]["schema"]["const"],
        RUN["$defs"]["report"]["properties"]["schema"]["const"],
    } == {SCHEMA}
    assert RUN["$id"].endswith(f":{SCHEMA}")


def test_every_cause_is_in_the_schema_in_the_order_of_precedence() -> None:
    assert RUN["$defs"]["failure"]["properties"]["cause"]["enum"] == list(CAUSES)


def test_every_key_of_a_report_is_described_and_no_other_is() -> None:
    read = json.loads(EVERYTHING.to_json())
    VALIDATORS["report"].validate(read)
    found = list(pairs(read, REPORT))
    assert len(found) == 1 + 5 + 2
    for written, described in found:
        assert written == described


def run_apart(example: str, *arguments: str) -> dict[str, Any]:
    """Run the command in its own process: other tests declare its operators in this one."""
    start = "from opsmith.cli import main; main()"
    target = str(EXAMPLES / f"{example}.py")
    command = [sys.executable, "-c", start, "check", target, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout)
    return read


SESSION = "hot_reload"
"""The example that declares its operators one after the other, in cells, and leaves none behind."""


@pytest.mark.slow
@pytest.mark.parametrize("example", ["quick_start"])
def test_the_command_prints_what_the_schema_says(example: str) -> None:
    read = run_apart(example, *FAST)
    VALIDATORS["run"].validate(read)
    assert read["passed"] is True
    for written, described in pairs(read, RUN):
        assert written == described


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted({path.stem for path in EXAMPLES.glob("*.py")} - {SESSION}))
def test_a_whole_check_of_an_example_is_what_the_schema_says(example: str) -> None:
    read = run_apart(example)
    VALIDATORS["run"].validate(read)
    assert read["passed"] is True


def test_failures_and_what_could_not_be_checked_are_described_too(tmp_path: Path) -> None:
    file = tmp_path / "schema_subjects.py"
    file.write_text(
        "import torch, opsmith\n"
        "@opsmith.operator('schema::wrong')\ndef wrong(x: torch.Tensor) -> torch.Tensor:\n    return x * x\n"
        "wrong.gradients(x=lambda grad, x: -2 * grad * x)\n"
        "wrong.samples(lambda make: [(make(3),)])\n"
        "@opsmith.operator('schema::without')\ndef without(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x + 1\n"
    )
    read = run(str(file), *FAST)
    VALIDATORS["run"].validate(read)
    outcomes = {outcome["property"]: outcome for outcome in read["reports"][0]["outcomes"]}
    assert [failure["cause"] for failure in outcomes["gradient"]["failures"]] == ["sign"]
    assert [(each["operator"], each["file"]) for each in read["unchecked"]] == [
        ("schema::without", str(file))
    ]
    for written, described in pairs(read, RUN):
        assert written == described


BREAKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda read: read.update(schema=1),
    "status": lambda read: read["outcomes"][0].update(status="succeeded"),
    "passed with failures": lambda read: read["outcomes"][1].update(status="passed"),
    "failed without": lambda read: read["outcomes"][0].update(status="failed"),
    "no operator": lambda read: read.pop("operator"),
    "effort": lambda read: read.update(effort="lazy"),
    "negative time": lambda read: read["outcomes"][0].update(seconds=-1),
    "no message": lambda read: read["outcomes"][1]["failures"][0].update(message=""),
    "cause": lambda read: read["outcomes"][1]["failures"][0].update(cause="because"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_schema_refuses_what_is_no_report(name: str) -> None:
    read = EVERYTHING.to_dict()
    BREAKS[name](read)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATORS["report"].validate(read)


@pytest.mark.slow
def test_the_report_of_python_is_that_of_the_command() -> None:
    import opsmith.ops

    report = opsmith.check(opsmith.ops.exp, only=["forward", "gradient"])
    VALIDATORS["report"].validate(json.loads(report.to_json()))
