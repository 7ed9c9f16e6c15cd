"""The cache with real kernels under real misfortune: all processes end right or with a clear error.

None hangs, and nothing that is wrong is ever loaded: each run compares the results of its kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import opsmith

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
]

PROGRAM = Path(__file__).with_name("kernel_torture.py")
LIMIT_S = 900
BUILT = 3
"""Two kernels, and what lies between them and torch."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory into which another user can look, as pytest's own are not."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def torture(
    mode: str, cache: Path, more: Mapping[str, str] | None = None, before: str = ""
) -> tuple[Any, str]:
    """Run the program; return its findings and the errors of its processes."""
    path = os.pathsep.join([str(Path(opsmith.__file__).parents[1]), str(PROGRAM.parent)])
    command = [sys.executable, str(PROGRAM), mode]
    if before:
        command = ["unshare", "-rm", "sh", "-c", f'{before} && exec "$0" "$@"', *command]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OPSMITH_CACHE": str(cache), **(more or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *said, found = done.stdout.splitlines()
    return json.loads(found), "\n".join([*said, *done.stderr.splitlines()])


def warned(said: str, processes: int = 1) -> bool:
    """Return whether each process gave one warning, that its kernels are built for it alone, and no more."""
    lines = [line for line in said.splitlines() if not line.startswith("  ")]  # without the line of source
    words = "RuntimeWarning: kernels are built for this process alone"
    return len(lines) == processes and all(words in line for line in lines)


def compiler(folder: Path, before: str) -> str:
    """A compiler that does something before it compiles."""
    program = folder / "compiler"
    real = shutil.which("g++")
    program.write_text(f'#!/bin/sh\n{before}\nexec {real} "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_of_sixteen_processes_at_once_one_builds_and_all_are_right(folder: Path) -> None:
    log = folder / "log"
    counting = compiler(folder, f'echo "$@" >> {log}')
    found, said = torture("together", folder / "cache", {"CXX": counting})
    assert (found, said) == ({"statuses": [0] * 16, "entries": BUILT}, "")
    compiled = [line for line in log.read_text().splitlines() if " -E" not in line]  # each one preprocesses
    assert len(compiled) == BUILT + 1  # what lies between takes two


def test_after_fifty_kills_at_random_moments_everything_is_right(folder: Path) -> None:
    found, said = torture("killed", folder / "cache")
    assert found["deaths"] >= 25, "the others were done before"
    assert len(found["after"]) > 5
    assert set(found["after"]) == {0}
    assert (found["leftover"], found["entries"], said) == ([], BUILT, "")


def test_no_file_of_an_entry_is_used_once_it_is_damaged(folder: Path) -> None:
    found, said = torture("corrupted", folder / "cache")
    assert said == ""
    assert found["files"] >= 4 * BUILT
    names = {name.split()[1] for name in found["found"]}
    assert {"kernel.so", "kernel.cpp", "opsmith.h", "manifest.json", "libtorch_cpu.so"} <= names
    for name, answers in found["found"].items():
        assert all(answer == [0, True] for answer in answers), name


def test_in_a_read_only_directory_all_is_right(folder: Path) -> None:
    found, said = torture("read_only", folder / "cache", {"TMPDIR": "/tmp"})
    assert found == {"statuses": [0, 0], "entries": 0}
    assert warned(said), said  # where the entries are there, nothing is built


def can_mount() -> bool:
    """Return whether this user may mount a small disk."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("kilobytes", [4, 16, 48, 100, 200])
def test_on_a_full_disk_a_kernel_is_built_for_the_process(folder: Path, kilobytes: int) -> None:
    if not can_mount():
        pytest.skip("this user may not mount a small disk")
    disk = folder / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={kilobytes}k,mode=700 tmpfs {disk}"
    found, said = torture("once", disk / "cache", before=mount)
    assert found["status"] == 0, said
    assert warned(said), said
    assert found["entries"] < BUILT


def test_where_every_disk_is_full_the_error_says_so(folder: Path) -> None:
    if not can_mount():
        pytest.skip("this user may not mount a small disk")
    disk = folder / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=16k,mode=700 tmpfs {disk}"
    found, said = torture("once", disk / "cache", {"TMPDIR": str(disk)}, before=mount)
    assert found["status"] == 3
    assert said.startswith(
        "CacheError: torture::times_2: a kernel cannot be built, as no temporary file can be written\n"
    )
    assert "No space left on device" in said


def test_a_compiler_that_cannot_write_into_the_cache_writes_elsewhere(folder: Path) -> None:
    """The writer that fails is injected: of a disk that is full only for it."""
    cache = folder / "cache"
    failing = (
        f'case "$PWD" in {cache}/*) echo "fatal error: kernel.so: No space left on device"; exit 1;; esac'
    )
    found, said = torture("once", cache, {"CXX": compiler(folder, failing)})
    assert found == {"status": 0, "entries": 0}
    assert warned(said), said
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
