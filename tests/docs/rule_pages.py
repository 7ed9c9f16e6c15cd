"""Examples of the rules' pages."""

from __future__ import annotations

from pathlib import Path

from doc_pages import Program

import opsmith.rules
from opsmith.rules import Rule, rules

TEXTS = Path(opsmith.rules.__file__).parent


def texts() -> dict[str, Path]:
    """The file of each rule's text, by the rule's key."""
    return {each.key: TEXTS / each.file for each in rules()}


def example(rule: Rule) -> Program:
    """The example of a rule; all are called `example.py`, so that one may declare what others declare."""
    text = (TEXTS / rule.file).read_text(encoding="utf-8")
    return Program(Path("example.md"), text, shows_errors=True)
