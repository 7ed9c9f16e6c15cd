"""All tests are collected: pytest leaves out folders by their names, and says nothing."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def test_pytest_leaves_out_no_folder_of_tests(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    folders = {folder for file in TESTS.rglob("test_*.py") for folder in file.relative_to(TESTS).parts[:-1]}
    assert folders >= {"build", "project"}
    assert [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in left_out)] == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports each file by its name alone, and collects no second one of the same name."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
