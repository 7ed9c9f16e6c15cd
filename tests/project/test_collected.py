"""All tests are collected: pytest leaves out folders by their names, and says nothing."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def test_pytest_leaves_out_no_folder_of_tests(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    folders = {folder for file in TESTS.rglob("test_*.py") for folder in file.relative_to(TESTS).parts[:-1]}
    assert folders >= {"build", "project"}
    assert [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in left_out)] == []
