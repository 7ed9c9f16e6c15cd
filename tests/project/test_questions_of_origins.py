"""Origins answer questions about code: the number of other questions only falls."""

from __future__ import annotations

import re
from pathlib import Path

import opsmith

ROOT = Path(opsmith.__file__).parent
FIELDS = re.compile(r"\.adopted\b|adopted_from|functional_forward|library_operator\b")
"""The fields that one origin has replaced."""
KIND = re.compile(r"origin\.kind\b|isinstance\([\w.]*\borigin\b")
"""A question that a new origin has to be added to."""
MOST_KINDS = 27


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if "origins" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_field_of_a_specification_tells_an_origin_but_origin() -> None:
    """The lines that are left name the modules of adopted classes, in imports."""
    imports = re.compile(r": from opsmith\.(core|torch_library)\.adopted\b")
    assert [line for line in lines_with(FIELDS) if not imports.search(line)] == []


def test_few_lines_ask_what_kind_an_origin_is() -> None:
    """A question of meaning is better: `origin.own("gradient")`. Where a line goes, the number falls."""
    asked = lines_with(KIND)
    assert len(asked) <= MOST_KINDS, "\n".join(asked)
    assert len(asked) > MOST_KINDS - 5, f"set MOST_KINDS to {len(asked)}"
