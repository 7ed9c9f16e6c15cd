"""The cache with real kernels under real misfortune: all processes end right or with a clear error.

None hangs, and nothing that is wrong is ever loaded: each run compares the results of its kernels.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from programs import can_mount, compiler, remembering, torture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
]

BUILT = 3
"""Two kernels, and what lies between them and torch."""


def kernels(
    mode: str, cache: Path, more: Mapping[str, str] | None = None, before: str = ""
) -> tuple[Any, str]:
    return torture(
        "kernel_torture", mode, variables={"OPSMITH_CACHE": str(cache), **(more or {})}, before=before
    )


def warned(said: str, processes: int = 1) -> bool:
    """Return whether each process gave one warning, that its kernels are built for it alone, and no more."""
    lines = [line for line in said.splitlines() if not line.startswith("  ")]  # without the line of source
    words = "RuntimeWarning: kernels are built for this process alone"
    return len(lines) == processes and all(words in line for line in lines)


def test_of_32_processes_at_once_one_builds_and_all_are_right(folder: Path) -> None:
    log = folder / "log"
    counting = compiler(folder, f'echo "$@" >> {log}\nexec g++ "$@"')
    found, said = kernels("together", folder / "cache", {"CXX": counting})
    assert (found, said) == ({"statuses": [0] * 32, "entries": BUILT}, "")
    compiled = [line for line in log.read_text().splitlines() if " -E" not in line]  # each one preprocesses
    assert len(compiled) == 2 * BUILT  # each is compiled, and linked


def test_after_60_kills_at_random_moments_everything_is_right(folder: Path) -> None:
    found, said = kernels("killed", folder / "cache")
    assert sum(found["deaths"].values()) == 60
    assert set(found["after"]) == {0}
    assert (found["running"], found["leftover"], found["entries"], said) == ([], [], BUILT, "")


def test_of_300_damaged_files_none_is_used(folder: Path) -> None:
    found, said = kernels("damaged", folder / "cache", {"CXX": remembering(folder)})
    assert (found["wrong"], said) == ({}, "")
    assert sum(found["damages"].values()) == sum(found["files"].values()) == 300
    assert {"kernel.so", "kernel.cpp", "opsmith.h", "manifest.json", "index"} <= set(found["files"])


def test_in_a_read_only_directory_all_is_right(folder: Path) -> None:
    found, said = kernels("read_only", folder / "cache", {"TMPDIR": "/tmp"})
    assert found == {"statuses": [0, 0], "entries": 0}
    assert warned(said), said  # where the entries are there, nothing is built


@pytest.mark.parametrize("kilobytes", [4, 16, 48, 100, 200])
def test_on_a_full_disk_a_kernel_is_built_for_the_process(folder: Path, kilobytes: int) -> None:
    if not can_mount():
        pytest.skip("this user may not mount a small disk")
    disk = folder / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={kilobytes}k,mode=700 tmpfs {disk}"
    found, said = kernels("once", disk / "cache", before=mount)
    assert found["status"] == 0, said
    assert warned(said), said
    assert found["entries"] < BUILT


def test_where_every_disk_is_full_the_error_says_so(folder: Path) -> None:
    if not can_mount():
        pytest.skip("this user may not mount a small disk")
    disk = folder / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=16k,mode=700 tmpfs {disk}"
    found, said = kernels("once", disk / "cache", {"TMPDIR": str(disk)}, before=mount)
    assert found["status"] == 3
    assert said.startswith(
        "CacheError: torture::times_2: a kernel cannot be built, because no temporary file can be written\n"
    )
    assert "No space left on device" in said


def test_a_compiler_that_cannot_write_into_the_cache_writes_elsewhere(folder: Path) -> None:
    """The writer that fails is injected: of a disk that is full only for it."""
    cache = folder / "cache"
    full = 'echo "fatal error: kernel.so: No space left on device"; exit 1'
    failing = f'case "$PWD" in {cache}/*) {full};; esac\nexec g++ "$@"'
    found, said = kernels("once", cache, {"CXX": compiler(folder, failing)})
    assert found == {"status": 0, "entries": 0}
    assert warned(said), said
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
