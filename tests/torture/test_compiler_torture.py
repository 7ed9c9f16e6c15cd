"""Compilers that are none, fail, lie, print without end, or hang: each call is right, or a clear error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import torture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
]


def test_of_93_compilers_each_builds_or_is_told_and_leaves_nothing(folder: Path) -> None:
    found, said = torture("compiler_torture", str(folder), variables={"OPSMITH_CACHE": str(folder / "cache")})
    assert (found["unclear"], said) == ({}, "")
    assert found["right"] + found["refused"] == found["compilers"] == 93
