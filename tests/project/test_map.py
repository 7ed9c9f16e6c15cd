"""The map in docs/design-notes.md: every path that it names exists, and every package is named."""

from __future__ import annotations

import re
from pathlib import Path

import opsmith

ROOT = Path(opsmith.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "design-notes.md"
ROW = re.compile(r"^\| *((?:`[^`]+`(?:, *)?)+) *\|", re.MULTILINE)
HEADER = re.compile(r"^\| *path *\|.*\n\|[-| :]+\|\n((?:\|.*\n?)+)", re.MULTILINE)
DEPTH = 2
"""Packages of packages are named, such as `checking/samples`; what lies deeper need not be."""


def named(page: str) -> list[str]:
    """The paths in the tables whose first column is called `path`: relative to src/opsmith, in backticks."""
    rows = "".join(table[1] for table in HEADER.finditer(page))
    return [path.rstrip("/") for cell in ROW.findall(rows) for path in re.findall(r"`([^`]+)`", cell)]


def packages() -> set[str]:
    found = {path.parent.relative_to(ROOT) for path in ROOT.rglob("__init__.py")}
    return {path.as_posix() for path in found if 0 < len(path.parts) <= DEPTH}


def test_the_map_is_true() -> None:
    paths = named(PAGE.read_text(encoding="utf-8"))
    assert len(set(paths)) == len(paths) > 0, "a path is named twice, or none at all"
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert packages() - set(paths) == set()


def test_paths_are_read_from_the_first_column_of_a_map() -> None:
    page = """
| key | what is done |
|---|---|
| `fake` | not a path |

| path | contents |
|---|---|
| `core` | values, `Schema` among them |
| `checking/samples/`, `checking/effort.py` | inputs |

| key | what is done |
"""
    assert named(page) == ["core", "checking/samples", "checking/effort.py"]
