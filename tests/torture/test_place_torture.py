"""The cache, or the folder for temporary files, in 73 places: a call is right or says what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import can_mount, remembering, torture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
]
PLACES = 73
REFUSED = {"OPSMITH_CACHE": 10, "XDG_CACHE_HOME": 1, "HOME": 1, "TMPDIR": 0}
"""Places of the least number that no user takes: others could write there."""


@pytest.mark.parametrize("variable", REFUSED)
def test_in_a_broken_place_a_call_is_right_or_says_what_is_wrong(folder: Path, variable: str) -> None:
    scratch = folder / "places"
    scratch.mkdir()
    environment = {"CXX": remembering(folder), "OPSMITH_CACHE": str(folder / "cache")}
    found, said = torture("place_torture", str(scratch), variable, variables=environment)
    assert (found["unclear"], said) == ({}, "")
    assert found["places"] == PLACES == found["right"] + found["refused"]
    assert found["refused"] >= REFUSED[variable]


@pytest.mark.parametrize("options", ["noexec", "ro", "noexec,ro"])
@pytest.mark.parametrize("variable", ["OPSMITH_CACHE", "TMPDIR"])
def test_on_a_disk_that_runs_or_takes_nothing_a_kernel_is_built_elsewhere(
    folder: Path, variable: str, options: str
) -> None:
    if not can_mount():
        pytest.skip("this user may not mount a disk")
    (folder / "disk").mkdir()
    mount = f"mount -t tmpfs -o mode=700,{options} tmpfs {folder}/disk"
    environment = {"OPSMITH_CACHE": str(folder / "cache"), variable: f"{folder}/disk"}
    found, said = torture("kernel_torture", "once", variables=environment, before=mount)
    assert found["status"] == 0, said
    warnings = said.count("kernels are built for this process alone")
    assert warnings == (variable == "OPSMITH_CACHE"), said
    assert (found["entries"] == 3) == (variable == "TMPDIR")
