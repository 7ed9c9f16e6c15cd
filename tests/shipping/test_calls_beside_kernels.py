"""Calls in C++ beside the kernels of a package: `opsmith build` puts them there, and processes find them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaged_kernels import RUNNABLE

import opsmith
from opsmith import config
from opsmith.torch_library.calls_extension import cached_calls

pytestmark = [
    pytest.mark.skipif(not RUNNABLE, reason="no level of this machine's processors is known"),
    pytest.mark.skipif(config.conservative() or config.calls_in_python(), reason="they are turned off"),
]

PACKAGE = """
import opsmith
from torch import Tensor

@opsmith.operator("beside::twice")
def twice(x: Tensor) -> Tensor:
    return x * 2

twice.kernel("cpu", cpp='''
void twice(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  for (int64_t i = 0; i < x.size(0); i++) y[i] = x[i] * 2;
}
''')
"""
PROGRAM = """
import beside, torch
from opsmith.torch_library import capabilities
before = capabilities.calls_in_cpp()
values = [beside.twice(torch.ones(3)).tolist() for _ in range(3)]
after = capabilities.calls_in_cpp()
print(before is None, values == [[2.0] * 3] * 3, getattr(after, "__file__", None))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    return folder


def run(tmp_path: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(opsmith.__file__).parents[1]), str(tmp_path)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OPSMITH_CACHE": str(cache), "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def built(tmp_path: Path, cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(
        tmp_path, cache, "-m", "opsmith", "build", "beside", "--cpu", RUNNABLE[-1], "--cuda", "none", *options
    )


@pytest.mark.slow
def test_a_process_finds_them_beside_the_kernels(package: Path, tmp_path: Path) -> None:
    entry = cached_calls()
    if entry is None:
        pytest.skip("calls in C++ are not built: `opsmith build --calls`")
    shutil.copytree(entry.directory, tmp_path / "cache" / entry.directory.name)
    (tmp_path / "cache").chmod(0o700)
    done = built(tmp_path, tmp_path / "cache", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [each["language"] for each in report["kernels"]] == ["calls", "runtime", "C++"]
    assert report["left_out"] == []
    done = run(tmp_path, tmp_path / "empty", "-c", PROGRAM)
    (file,) = (package / "_kernels").glob("opsmith.torch-*.so")
    assert (done.stdout, done.stderr) == (f"True True {file}\n", "")
    file.write_bytes(b"damaged")
    done = run(tmp_path, tmp_path / "empty", "-c", PROGRAM)
    assert done.stdout == "True True None\n"
    assert f"{file} is not used" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("forbidden", [True, False])
def test_a_package_is_built_without_them_where_they_cannot_be(
    package: Path, tmp_path: Path, forbidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "calls in C++: OPSMITH_NO_CALLS_BUILD prevents their build; unset it"
    if not forbidden:
        monkeypatch.delenv("OPSMITH_NO_CALLS_BUILD")
        compiler = tmp_path / "old-compiler"  # it knows no C++20
        compiler.write_text('#!/bin/sh\ncase "$*" in *c++20*) echo unknown; exit 1;; esac\nexec g++ "$@"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        reason = (
            "the C++ compiler does not compile calls in C++; name a different compiler in CXX; without them"
        )
    done = built(tmp_path, tmp_path / "empty")
    assert done.returncode == 0, done.stderr
    assert f"left out: {reason}" in done.stdout
    assert not [*(package / "_kernels").glob("opsmith.torch-*.so")]
