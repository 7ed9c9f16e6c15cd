"""A kernel that is built under one torch is loaded and run by another, from the same cache, as it is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import opsmith

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENVIRONMENTS = {path.parents[1].name: path for path in sorted(ROOT.glob(".venv*/bin/python"))}
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
    len(ENVIRONMENTS) < 2, reason="`make test-all` sets up the environments of other versions of torch"
)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_one_torch_built_runs_under_the_others(tmp_path: Path, name: str) -> None:
    others = [python for other, python in ENVIRONMENTS.items() if other != name]
    right, built, version = run(ENVIRONMENTS[name], tmp_path / "cache")
    assert right
    assert len(built) == 3  # two kernels, and what lies between them and torch
    for python in others:
        again, found, another = run(python, tmp_path / "cache")
        assert again
        assert another != version
        assert found == built
