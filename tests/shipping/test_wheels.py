"""Wheels of a package of `opsmith new`, by the build hook; and a machine without a compiler that has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from shipped_wheels import PURE, SRC, built_wheel, replace_in, run_hatchling

from opsmith.build.platform_tag import platform_tag
from opsmith.build.processor import best_level

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("wheels"),
    pytest.mark.skipif(
        sys.platform != "linux" or not best_level(), reason="it builds for this machine's level"
    ),
]

FILES = 4
"""Files of built kernels: the runtime, the kernels, the calls in C++ and the manifest."""

PROGRAM = """
import torch, wheeled
x = torch.linspace(-3, 3, 60_000).reshape(2_000, 30).requires_grad_()
beta = torch.linspace(-2, 2, 30)
explained = wheeled.swish.explain(x, beta)
assert explained.origin.startswith("built into the package"), explained
y = wheeled.swish(x, beta)
torch.testing.assert_close(y, wheeled.swish.reference(x, beta))
y.sum().backward()
torch.randn(2_000, 2_000).exp()
with open("/proc/self/maps") as maps:
    runtimes = {line.split()[-1] for line in maps if "gomp" in line or "iomp" in line or "libomp" in line}
print(len(runtimes), wheeled.__file__)
"""


def test_a_wheel_is_pure_by_a_variable(project: Path, tmp_path: Path) -> None:
    path = built_wheel(project, tmp_path, **PURE)
    assert path.name == "wheeled-0.1.0-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(path).namelist() if "_kernels" in name]


def test_a_wheel_with_built_kernels(project: Path, platform_wheel: Path, tmp_path: Path) -> None:
    held = zipfile.ZipFile(platform_wheel)
    held.extractall(tmp_path)
    libraries = sorted((tmp_path / "wheeled" / "_kernels").glob("*.so"))
    of_calls = [each for each in libraries if each.name.startswith("opsmith.torch-")]
    assert len(of_calls) == 1
    assert [each.name.split(".")[0] for each in libraries if each not in of_calls] == ["opsmith", "wheeled"]
    tag = platform_tag(libraries)
    assert tag.reason == ""
    assert platform_wheel.name == f"wheeled-0.1.0-py3-none-{tag.tag}.whl"
    wheel_file = held.read("wheeled-0.1.0.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in wheel_file
    assert f"Tag: py3-none-{tag.tag}\n" in wheel_file
    names = set(held.namelist())
    assert {"wheeled/_kernels/manifest.json", "wheeled/swish.cpp", "wheeled/py.typed"} <= names
    assert not (project / "src" / "wheeled" / "_kernels").exists(), "the working tree is as it was"
    for each in libraries:
        assert str(project).encode() not in each.read_bytes(), "no path of this machine"


def test_what_was_built_in_the_tree_is_in_no_wheel_but_what_the_hook_builds(
    project: Path, tmp_path: Path
) -> None:
    shutil.copytree(project, tmp_path / "wheeled")
    command = [sys.executable, "-m", "opsmith", "build", "wheeled", "--cpu", best_level()]
    place = tmp_path / "wheeled" / "src"
    environment = {**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{place}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len([*(place / "wheeled" / "_kernels").iterdir()]) == FILES
    for variables, count in ((PURE, 0), ({}, FILES)):
        held = zipfile.ZipFile(built_wheel(tmp_path / "wheeled", tmp_path, **variables)).namelist()
        assert len([name for name in held if "_kernels" in name]) == count


def test_a_wrong_kernel_makes_no_wheel(project: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wheeled"
    shutil.copytree(project, wrong)
    source = wrong / "src" / "wheeled" / "swish.cpp"
    replace_in(source, "exp(-beta[c]", "exp(beta[c]")
    done = run_hatchling(wrong, tmp_path)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "wheeled::swish" in said
    assert "opsmith: the kernels cannot be built (exit status 1" in said
    assert not list((tmp_path / "dist").glob("*.whl"))


def test_its_users_need_no_compiler_and_have_one_openmp_runtime(platform_wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(platform_wheel).extractall(site)
    shutil.copytree(
        SRC / "opsmith", site / "opsmith", ignore=shutil.ignore_patterns("__pycache__", "_kernels")
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM],
        env={
            **{name: value for name, value in os.environ.items() if name != "CXX"},
            "PYTHONPATH": str(site),
            "PATH": str(tmp_path / "nothing"),
            "OPSMITH_CACHE": str(tmp_path / "cache"),
            "OPSMITH_REQUIRE_KERNELS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"1 {site / 'wheeled' / '__init__.py'}\n"
