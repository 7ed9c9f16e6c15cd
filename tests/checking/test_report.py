"""Reports: their text, when they count as passed, and what they write."""

import json
import math
from typing import Any

import pytest

from opsmith import errors
from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.causes import CAUSES
from opsmith.judging.compare import Difference

FAILURE = Failure(
    "gradient",
    "x",
    "sign",
    "the gradient of `x` is wrong:\nsecond line",
    where="file.py:3",
    evidence={"index": [2, 0], "got": 1.25, "spread": 1 / 3},
    replay="first()\nsecond()",
)


def report(**statuses: str) -> Report:
    """A report of properties with these statuses; `out` means left out by the caller."""
    outcomes = [
        Outcome(name, "skipped" if status == "out" else status, left_out=status == "out")  # type: ignore[arg-type]
        for name, status in statuses.items()
    ]
    return Report("demo::op", tuple(outcomes), seed=0)


@pytest.mark.parametrize(
    ("statuses", "passed", "as_asked", "verdict"),
    [
        ({"forward": "passed", "gradient": "passed"}, True, True, "passed"),
        ({"forward": "passed", "surrogate": "passed"}, True, True, "passed"),
        ({"forward": "passed", "gradient": "passed", "effects": "failed"}, False, False, "FAILED: effects"),
        ({"forward": "failed", "gradient": "failed"}, False, False, "FAILED: forward, gradient"),
        (
            {"forward": "passed", "gradient": "skipped"},
            False,
            False,
            "NOT PASSED: gradient could not be checked",
        ),
        (
            {"forward": "skipped", "gradient": "skipped"},
            False,
            False,
            "NOT PASSED: forward and gradient could not be checked",
        ),
        (
            {"forward": "passed", "gradient": "out"},
            False,
            True,
            "passed the requested properties; not checked: gradient",
        ),
        ({"forward": "passed", "gradient": "skipped", "surrogate": "out"}, False, False, "NOT PASSED: "),
        (
            {"forward": "out", "gradient": "out", "surrogate": "passed"},
            False,
            True,
            "passed the requested properties",
        ),
        ({"effects": "passed", "forward": "out", "gradient": "skipped"}, False, False, "NOT PASSED: "),
        ({"forward": "out", "gradient": "out"}, False, False, "NOT PASSED: "),
        (
            {"forward": "skipped", "gradient": "out"},
            False,
            False,
            "NOT PASSED: forward could not be checked",
        ),
        (
            {"forward": "out", "gradient": "out", "second_order": "skipped", "vmap": "skipped"},
            False,
            False,
            "NOT PASSED: second_order and vmap could not be checked",
        ),
    ],
)
def test_skipped_is_never_success(
    statuses: dict[str, str], passed: bool, as_asked: bool, verdict: str
) -> None:
    made = report(**statuses)
    assert made.passed is passed
    assert made.passed_as_asked is as_asked
    assert made.verdict().startswith(f"demo::op: {verdict}")


def test_a_failure_in_text() -> None:
    assert str(FAILURE).splitlines() == [
        "gradient of `x`: sign",
        "  the gradient of `x` is wrong:",
        "  second line",
        "  where: file.py:3",
        "  cause: The gradient has the wrong sign.",
        "  fix: Negate the formula, or swap the two operands of its subtraction.",
        "  index: [2, 0]",
        "  got: 1.25",
        "  spread: 0.333333",
        "  replay:",
        "    first()",
        "    second()",
        "  more: opsmith rule sign",
    ]


def test_the_hint_of_an_error_stands_for_the_fix_of_its_cause() -> None:
    error = errors.CompileError("the C++ compiler refuses the kernel", hint="fix the first of these")
    hinted = Failure("forward", None, "raises", f"CompileError: {error.message()}")
    assert [label for label, _ in hinted.guidance()] == ["cause"]
    plain = Failure("forward", None, "raises", "RuntimeError: the hint: none")
    assert plain.guidance()[-1] == ("fix", CAUSES["raises"].fix)


def test_a_failure_that_follows_from_another_is_one_line() -> None:
    follower = Failure("effects", None, "raises", "RuntimeError: no", follows="forward")
    assert str(follower) == "effects: raises, which follows from `forward`"


def test_a_report_in_text() -> None:
    outcomes = (
        Outcome("forward", "passed", seconds=0.25, notes=("bfloat16 was left out",)),
        Outcome("gradient", "failed", seconds=1.0, failures=(FAILURE,)),
        Outcome("second_order", "skipped", "nobody needed it"),
    )
    lines = str(Report("demo::op", outcomes, seed=0)).splitlines()
    assert lines[:2] == ["demo::op: FAILED: gradient; 1 error", ""]
    assert lines[2:-6] == [*str(FAILURE).splitlines(), ""]
    assert lines[-6:] == [
        "  forward           passed     0.25 s",
        "    bfloat16 was left out",
        "  gradient          failed     1.00 s",
        "  skipped: 1",
        "    second_order: nobody needed it",
        "  1.25 s; seed 0, default effort",
    ]


def test_failures_and_reports_can_be_elements_of_a_set() -> None:
    first, second = (
        Report(
            "demo::op", (Outcome("gradient", "failed", failures=(FAILURE,)),), seed, environment={"a": "b"}
        )
        for seed in (0, 0)
    )
    assert {first, second} == {first}
    assert {*first.failures, *second.failures} == {FAILURE}


def test_json_holds_everything_and_is_json() -> None:
    odd = Failure(
        "forward", None, "unknown", "m", evidence={"got": math.nan, "expected": 1 + 2j, "pair": (1, 2)}
    )
    outcomes = (
        Outcome("forward", "failed", failures=(odd,)),
        Outcome("gradient", "skipped", "why", left_out=True),
    )
    made = Report("demo::op", outcomes, seed=7, environment={"torch": "2"})
    read = json.loads(made.to_json())
    assert read["schema"] == 4
    assert (read["operator"], read["passed"], read["seed"]) == ("demo::op", False, 7)
    assert read["environment"] == {"torch": "2"}
    assert read["outcomes"][1] == {
        "property": "gradient",
        "status": "skipped",
        "reason": "why",
        "seconds": 0.0,
        "notes": [],
        "left_out": True,
        "compiles": False,
        "failures": [],
        "dtypes": [],
        "word": "skipped",
        "kernels": [],
    }
    assert read["outcomes"][0]["failures"] == [
        {
            "property": "forward",
            "input": None,
            "cause": "unknown",
            "message": "m",
            "where": None,
            "evidence": {"got": "nan", "expected": "(1+2j)", "pair": [1, 2]},
            "replay": None,
            "follows": None,
            "dtypes": [],
            "given": "usual",
            "minor": False,
            "severity": "error",
            "accepted": None,
        }
    ]


@pytest.mark.parametrize(
    ("got", "right", "words"),
    [
        (0.5, 0.25, "it is 0.5 where 0.25 is right"),
        (-0.26959004, -0.26959002, "it is -0.26959004 where -0.26959002 is right"),
        (1.0, 1.0 + 2**-52, "it is 1 where 1.0000000000000002 is right"),
        (3, 4, "it is 3 where 4 is right"),
    ],
)
def test_numbers_that_differ_are_written_so_that_they_do(got: Any, right: Any, words: str) -> None:
    assert str(Difference((), got, right, 1, 1)) == words
