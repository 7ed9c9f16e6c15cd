"""The table at the top of docs/errors.md: a row for each class, from its docstring and its section."""

from __future__ import annotations

import re

from doc_pages import ROOT, python_blocks

from opsmith import errors

ERRORS_PAGE = ROOT / "docs" / "errors.md"
BEGIN = "<!-- The table is generated: python tests/docs/update.py errors.md -->"
END = "<!-- end of the table -->"


def names() -> list[str]:
    """Every class of error but the base."""
    return sorted(set(errors.__all__) - {"OpsmithError"})


def hints(text: str) -> dict[str, str]:
    """The hint in the message of each section that has one."""
    found: dict[str, str] = {}
    for block in python_blocks(text):
        hint = re.search(r"^  hint: (.*)$", block.expected, re.MULTILINE)
        if hint and block.expected.startswith(f"{block.heading}: "):
            found[block.heading] = hint[1].replace("|", "\\|")
    return found


def table(text: str) -> str:
    """The table for a page with these sections."""
    given = hints(text)
    rows = ["| class | when | hint, in the example below |", "|---|---|---|"]
    for name in names():
        when = (getattr(errors, name).__doc__ or "").strip().splitlines()[0]
        rows.append(f"| [`{name}`](#{name.lower()}) | {when} | {given.get(name, '')} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """The page with its table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(text)}\n{END}{after}"
