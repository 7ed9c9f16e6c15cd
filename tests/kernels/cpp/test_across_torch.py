"""A kernel that is built under one torch is loaded and run by another, from the same cache, as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import opsmith

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
OTHERS = {path.name: path / "bin" / "python" for path in (ROOT / ".venv", ROOT / ".venv-torch211")}
PROGRAM = """
import json, sys, torch, opsmith
from opsmith.build.cache import cache_on_disk
from cpp_operators import scaled, told

x = torch.arange(6.0).reshape(2, 3).mT
right = torch.equal(scaled(x, 2.0, torch.ones(1)), x * 2 + 1)
x = torch.ones(1, dtype=torch.float64)
arguments = (x, [x, x], [1, 2], [0.5], [True], "word", 3, True, None, 0.5, "w")
right = right and torch.equal(told(*arguments), told.reference(*arguments))
built = {path.name: path.stat().st_mtime_ns for path in cache_on_disk().entries()}
print(json.dumps([right, built, torch.__version__]))
"""


def run(python: Path, cache: Path) -> tuple[bool, dict[str, int], str]:
    path = os.pathsep.join([str(Path(opsmith.__file__).parents[1]), str(HERE), str(HERE.parent)])
    done = subprocess.run(
        [python, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path, "OPSMITH_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    right, built, version = json.loads(done.stdout)
    return right, built, version


@pytest.mark.slow
@pytest.mark.skipif(
    not all(python.exists() for python in OTHERS.values()),
    reason="`make test-all` sets up the environments of both versions of torch",
)
@pytest.mark.parametrize("newer_first", [True, False])
def test_what_one_torch_built_runs_under_the_other(tmp_path: Path, newer_first: bool) -> None:
    pythons = [*OTHERS.values()][:: 1 if newer_first else -1]
    (right, built, first), (again, found, second) = (run(python, tmp_path / "cache") for python in pythons)
    assert right
    assert again
    assert first != second
    assert found == built
    assert len(built) == 3  # two kernels, and what lies between them and torch


@pytest.mark.slow
def test_in_a_new_process_it_comes_from_the_disk(tmp_path: Path) -> None:
    results = [run(Path(sys.executable), tmp_path / "cache") for _ in range(2)]
    assert results[0] == results[1]
    assert results[0][0]
