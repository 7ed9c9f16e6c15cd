"""Accepted findings: listed with their reasons, not counted, and noted where they no longer occur."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functions import Backwards
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.accepting import project_findings, with_baseline
from opsmith.checking.severity import name_roots


def checked(**options: Any) -> Report:
    torch.manual_seed(0)
    only = ["forward", "gradient", "second_order"]
    return opsmith.check(Backwards, samples=[(torch.randn(3),)], only=only, effort="quick", **options)


def test_an_accepted_finding_is_listed_and_does_not_count() -> None:
    report = checked(accept={("gradient", "sign"): "it is meant so"}, strict=True)
    assert report.passed, report
    assert report.verdict() == "Backwards: passed; 1 accepted"
    assert "gradient of `x`: sign, accepted: it is meant so" in str(report).splitlines()
    assert {each.accepted for each in report.failures} == {"it is meant so"}
    (outcome,) = (each for each in report.to_dict()["outcomes"] if each["property"] == "gradient")
    assert outcome["failures"][0]["accepted"] == "it is meant so"


def test_what_follows_from_an_accepted_finding_is_accepted() -> None:
    report = checked(accept={("gradient", "sign", "x"): "it is meant so"})
    followers = [each for each in report.failures if each.follows is not None]
    assert followers == [] or {each.accepted for each in followers} == {"it is meant so"}
    root = Failure("gradient", "x", "sign", "m")
    late = Failure("second_order", "x", "unknown", "m")
    made = name_roots(
        [Outcome("gradient", "failed", failures=(root,)), Outcome("second_order", "failed", failures=(late,))]
    )
    report = with_baseline(Report("demo::op", tuple(made), seed=0), Report("demo::op", (made[0],), seed=0))
    assert [each.accepted for each in report.failures] == ["it is in the baseline"] * 2
    assert [each.status for each in report.outcomes] == ["passed", "passed"]


def test_another_input_or_cause_is_not_accepted() -> None:
    other = {("gradient", "sign", "weight"): "of another argument", ("gradient", "scale"): "of another cause"}
    report = checked(accept=other)
    assert not report.passed
    assert [each for each in report.remarks if "no longer occurs" in each] == [
        "`gradient of `weight`: sign` is accepted (of another argument), but no longer occurs: "
        "remove it from `accept`",
        "`gradient: scale` is accepted (of another cause), but no longer occurs: remove it from `accept`",
    ]


def test_a_finding_of_a_property_that_did_not_run_is_not_called_gone() -> None:
    assert not any("no longer" in each for each in checked(accept={("vmap", "raises"): "known"}).remarks)


def test_declarations_accept() -> None:
    accept = {("gradient", "sign"): "it is meant so"}
    adopted = opsmith.adopt(Backwards, "accepting::backwards", accept=accept)
    torch.manual_seed(0)
    options: dict[str, Any] = {"samples": [(torch.randn(3),)], "effort": "quick"}
    assert opsmith.check(adopted, only=["forward", "gradient"], **options).passed

    def twice(x: Tensor) -> Tensor:
        return x + x

    declared = opsmith.operator("accepting::twice", accept=accept)(twice)
    wrong = declared.gradients(x=lambda grad: -2 * grad)
    assert opsmith.check(wrong, only=["forward", "gradient"], **options).passed


@pytest.mark.parametrize(
    ("accept", "words"),
    [
        (["gradient"], "accepted findings are given by property and cause"),
        ({"gradient": "r"}, "accepted findings are given by property and cause"),
        ({("gradient", "sign", "x", "y"): "r"}, "accepted findings are given by property and cause"),
        ({("gradient", "sign"): ""}, "an accepted finding needs a reason"),
        ({("gradent", "sign"): "r"}, "there is no property `gradent`"),
        ({("gradient", "because"): "r"}, "there is no cause `because`"),
    ],
)
def test_what_cannot_be_accepted_is_refused(accept: Any, words: str) -> None:
    with pytest.raises(errors.UsageError, match=words) as caught:
        checked(accept=accept)
    assert caught.value.argument == "accept"
    assert caught.value.hint


PROJECT = """
[tool.opsmith]
accept = [
    {operator = "demo::op", property = "vmap", cause = "raises", reason = "it reads numbers"},
    {operator = "demo::op", property = "gradient", cause = "sign", input = "x", reason = "meant"},
    {operator = "demo::other", property = "vmap", cause = "raises", reason = "another"},
]
"""


def test_a_project_accepts_in_its_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    below = tmp_path / "src" / "package"
    below.mkdir(parents=True)
    assert project_findings("demo::op", below) == {
        ("vmap", "raises"): "it reads numbers",
        ("gradient", "sign", "x"): "meant",
    }
    assert project_findings("demo::third", below) == {}


@pytest.mark.parametrize(
    "text",
    [
        "[tool.opsmith]\naccept = 3\n",
        "[tool.opsmith]\naccept = [3]\n",
        '[tool.opsmith]\naccept = [{operator = "demo::op", property = "vmap"}]\n',
        '[tool.opsmith]\naccept = [{operator = "o", property = "p", cause = "c", reason = "r", why = "w"}]\n',
        "[tool.opsmith\n",
        "[tool]\nopsmith = 3\n",
        "tool = 3\n",
        pytest.param(f"deep = {'[' * 100_000}{']' * 100_000}\n", id="brackets"),
    ],
)
def test_a_bad_pyproject_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(errors.UsageError, match=r"`accept` in the table .* cannot be read") as caught:
        project_findings("demo::op", tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "entry", ['property = "vamp", cause = "raises"', 'property = "vmap", cause = "raised"']
)
def test_an_unknown_name_in_pyproject_is_an_error_that_names_the_file(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(f'[tool.opsmith]\naccept = [{{operator = "demo::op", {entry}, reason = "r"}}]\n')
    with pytest.raises(errors.UsageError, match=r"there is no (property|cause)") as caught:
        project_findings("demo::op", tmp_path)
    assert caught.value.where == str(file)
    assert project_findings("demo::other", tmp_path) == {}


def test_only_what_is_new_counts_beside_a_baseline() -> None:
    before = checked()
    assert not before.passed
    same = with_baseline(before, before)
    assert same.passed
    assert same.verdict() == "Backwards: passed; 1 accepted"
    gradient = next(each for each in before.outcomes if each.property == "gradient")
    known = tuple(replace(each, accepted="it is meant") for each in gradient.failures)
    (kept,) = with_baseline(replace(before, outcomes=(replace(gradient, failures=known),)), before).outcomes
    assert {each.accepted for each in kept.failures} == {"it is meant"}  # and not the baseline
    new = replace(gradient.failures[0], cause="scale")
    more = replace(gradient, failures=(*gradient.failures, new))
    report = replace(before, outcomes=tuple(more if each is gradient else each for each in before.outcomes))
    assert with_baseline(report, before).errors == (new,)
    unnamed = replace(gradient.failures[0], input=None)
    earlier = replace(before, outcomes=(replace(gradient, failures=(unnamed,)),))
    assert not with_baseline(before, earlier).passed
