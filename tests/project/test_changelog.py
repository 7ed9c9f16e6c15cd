"""CHANGELOG.md: its form, and the version that it ends with."""

import re
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest

import opsmith

TEXT = (Path(__file__).resolve().parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
HEADING = re.compile(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)")
PARTS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
MOST = 25
"""Lines of a version: nobody reads more."""

_, FIRST, *VERSIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)


def heading(section: str) -> tuple[tuple[int, ...], date]:
    """Number and day of a version."""
    found = HEADING.fullmatch(section.splitlines()[0])
    assert found, section.splitlines()[0]
    return tuple(map(int, found.groups()[:3])), date.fromisoformat(found[4])


def test_what_is_not_released_stands_first() -> None:
    assert FIRST.splitlines()[0] == "[Unreleased]"
    assert len(re.findall(r"^- ", FIRST, re.MULTILINE)) <= MOST


def test_versions_fall_in_number_and_day() -> None:
    for (later, its_day), (earlier, day) in pairwise(map(heading, VERSIONS)):
        assert later > earlier
        assert its_day >= day


def test_the_newest_version_is_that_of_the_package() -> None:
    number, _ = heading(VERSIONS[0])
    assert ".".join(map(str, number)) == opsmith.__version__


@pytest.mark.parametrize("section", VERSIONS, ids=lambda section: section.split("]")[0].strip("["))
def test_a_version_has_a_sentence_and_a_few_lines_in_known_parts(section: str) -> None:
    about, *parts = re.split(r"^### ", section.partition("\n")[2], flags=re.MULTILINE)
    assert re.fullmatch(r"\n[A-Z][^\n]*\.\n\n", about), about
    names = [part.splitlines()[0] for part in parts]
    assert set(names) <= PARTS
    assert len(names) == len(set(names)) > 0
    lines = [line for part in parts for line in part.splitlines()[1:] if line]
    assert all(re.fullmatch(r"- .*[.:]", line) for line in lines)
    assert 0 < len(lines) <= MOST
