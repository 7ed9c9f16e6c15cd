"""One operator by a library and by Python in one process: they share it, or the error names both files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import differing_operator
import pytest
import torch
from served_operators import EVERY, scaled

from opsmith.shipping import build_torch_library

HERE = Path(__file__).parent
x = torch.arange(12.0).reshape(3, 4)

SEVERAL_LIBRARIES = """
import sys, torch
for path in sys.argv[1:]:
    torch.ops.load_library(path)
print(torch.ops.served.scaled(torch.ones(2)).tolist())
try:
    torch.ops.served.differing(torch.ones(1))
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    differing = differing_operator.declare(1)
    return build_torch_library([*EVERY, differing], tmp_path_factory.mktemp("library") / "libserved.so").path


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    words = [sys.executable, *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("first", ["python", "library"])
def test_python_takes_over_what_is_made_of_the_same_sources(first: str, library: Path) -> None:
    done = run("-W", "error::UserWarning", HERE / "share_served.py", first, library)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["gradient"] == torch.full((3, 4), 2.0).tolist()
    assert found["strides"] == [[1, 4]] * 3, "as the reference lays them out, which the library does not"
    assert found["moments"] == [x.sum(0).tolist(), x.max(0).values.tolist()]
    assert found["combined"] == (x[0] + x[1]).tolist()
    assert found["returned"]
    assert found["written"]
    assert "shift" in found["error"]
    for way in ("served", "handle"):
        assert "differing" in found[way], found[way]
        assert str(library) in found[way]
        assert "differing_operator.py:" in found[way]


@pytest.mark.slow
def test_of_several_libraries_the_first_computes_what_they_agree_about(library: Path, tmp_path: Path) -> None:
    same = shutil.copyfile(library, tmp_path / "libsame.so")
    other = build_torch_library([scaled, differing_operator.declare(3)], tmp_path / "libother.so").path
    done = run("-c", SEVERAL_LIBRARIES, library, same, other)
    computed, message = done.stdout.split("\n", 1)
    assert computed == "[2.0, 2.0]"
    assert message.startswith("served::differing: two parts of the process compute it")
    assert str(library) in message
    assert str(other) in message
    assert str(same) not in message
    assert message.strip() in done.stderr, "it is told when the library is loaded, too"
