"""`opsmith rule`: a page, the list, JSON, and a name that is not known."""

import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from opsmith.rules import rule, rules

Run = Callable[..., Result]


def test_a_page_is_printed_as_it_is_where_no_terminal_reads_it(opsmith: Run) -> None:
    done = opsmith("rule", "CapturedTensorError")
    assert (done.exit_code, done.stdout) == (0, rule("CapturedTensorError").text)


def test_a_terminal_gets_the_page_rendered(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = opsmith("rule", "CapturedTensorError")
    assert done.exit_code == 0
    assert "## " not in done.stdout
    assert "How to fix it" in done.stdout


def test_without_a_name_every_rule_is_listed(opsmith: Run) -> None:
    done = opsmith("rule")
    assert done.exit_code == 0
    assert [each.name for each in rules() if each.name not in done.stdout] == []


def test_json(opsmith: Run) -> None:
    page = rule("CapturedTensorError")
    assert json.loads(opsmith("rule", "CapturedTensorError", "--json").stdout) == {
        "schema": 1,
        "name": "CapturedTensorError",
        "kind": "error",
        "title": page.title,
        "address": "opsmith rule CapturedTensorError",
        "text": page.text,
    }
    listed = json.loads(opsmith("rule", "--json").stdout)
    assert listed == {"schema": 1, "rules": [each.to_dict() for each in rules()]}


def test_an_unknown_name_has_status_2_and_near_names(opsmith: Run) -> None:
    done = opsmith("rule", "CapturedTensor", "--json")
    assert done.exit_code == 2
    assert "hint: write `CapturedTensorError`" in done.stderr
    assert "there is no rule `CapturedTensor`" in json.loads(done.stdout)["error"]
