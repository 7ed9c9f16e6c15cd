"""The tables of docs/checking.md are those of the code."""

from __future__ import annotations

import re

from doc_pages import ROOT

from opsmith.checking.causes import CAUSES
from opsmith.checking.properties import PROPERTIES

_PAGE = (ROOT / "docs" / "checking.md").read_text(encoding="utf-8")


def _rows(section: str) -> list[list[str]]:
    """The cells of a section's table."""
    text = _PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_property_stands_in_the_table_with_its_promise() -> None:
    shown = [(name, promise) for name, promise, _ in _rows("The properties")]
    assert shown == [(f"`{each.name}`", each.title) for each in PROPERTIES.values()]


def test_every_cause_says_in_a_sentence_what_to_do() -> None:
    for each in CAUSES.values():
        assert re.fullmatch(r"[A-Z][a-z]+ .*[^.]\.", each.fix), each.name
        assert len(each.fix) < 100, each.name


def test_every_cause_stands_in_the_table_with_its_meaning_in_the_order_of_precedence() -> None:
    shown = [tuple(row) for row in _rows("The causes")]
    assert shown == [(f"`{each.name}`", each.meaning) for each in CAUSES.values()]
