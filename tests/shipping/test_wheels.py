"""Wheels of a package of `opsmith new`, by the build hook; and a machine without a compiler that has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import opsmith
from opsmith.build.platform_tag import platform_tag
from opsmith.build.processor import best_level
from opsmith.scaffolding import new_package

SRC = Path(opsmith.__file__).parents[1]
HOOK = "[hatch]\nopsmith = hatch_opsmith\n"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or not best_level(), reason="it builds for this machine's level"
    ),
]

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


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new package whose hook builds for this machine's level alone, and metadata of the hook."""
    folder = tmp_path_factory.mktemp("project")
    new_package("wheeled", folder / "wheeled", cuda=False)
    settings = folder / "wheeled" / "pyproject.toml"
    table = "[tool.hatch.build.targets.wheel.hooks.opsmith]\n"
    text = settings.read_text()
    assert table in text
    settings.write_text(text.replace(table, f'{table}cpu = "{best_level()}"\n'))
    metadata = folder / "hook" / "hook_of_tests-0.dist-info"  # as if this checkout were installed
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hook-of-tests\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(HOOK)
    return folder / "wheeled"


def wheel(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    shutil.rmtree(project / "dist", ignore_errors=True)
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{project.parent / 'hook'}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def built(project: Path, **variables: str) -> Path:
    done = wheel(project, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (project / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def platform_wheel(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = tmp_path_factory.mktemp("kept")
    return Path(shutil.move(built(project, HATCH_BUILD_HOOKS_ENABLE="1"), kept))


def test_a_wheel_is_pure_without_the_hook_and_by_a_variable(project: Path) -> None:
    for variables in ({}, {"HATCH_BUILD_HOOKS_ENABLE": "1", "OPSMITH_PURE_WHEEL": "1"}):
        path = built(project, **variables)
        assert path.name == "wheeled-0.1.0-py3-none-any.whl"
        assert not [name for name in zipfile.ZipFile(path).namelist() if "_kernels" in name]


def test_a_wheel_with_built_kernels(project: Path, platform_wheel: Path, tmp_path: Path) -> None:
    held = zipfile.ZipFile(platform_wheel)
    held.extractall(tmp_path)
    libraries = sorted((tmp_path / "wheeled" / "_kernels").glob("*.so"))
    assert [each.name.split(".")[0] for each in libraries] == ["opsmith", "wheeled"]
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
    for part in ("wheeled", "hook"):
        shutil.copytree(project.parent / part, tmp_path / part)
    command = [sys.executable, "-m", "opsmith", "build", "wheeled", "--cpu", best_level()]
    place = tmp_path / "wheeled" / "src"
    environment = {**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{place}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len([*(place / "wheeled" / "_kernels").iterdir()]) == 2
    with_hook = {"HATCH_BUILD_HOOKS_ENABLE": "1"}
    for variables, count in (({}, 0), ({**with_hook, "OPSMITH_PURE_WHEEL": "1"}, 0), (with_hook, 2)):
        held = zipfile.ZipFile(built(tmp_path / "wheeled", **variables)).namelist()
        assert len([name for name in held if "_kernels" in name]) == count


def test_a_wrong_kernel_makes_no_wheel(project: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wheeled"
    shutil.copytree(project, wrong)
    shutil.copytree(project.parent / "hook", tmp_path / "hook")
    source = wrong / "src" / "wheeled" / "swish.cpp"
    text = source.read_text()
    assert "exp(-beta[c]" in text
    source.write_text(text.replace("exp(-beta[c]", "exp(beta[c]"))
    done = wheel(wrong, HATCH_BUILD_HOOKS_ENABLE="1")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "wheeled::swish" in said
    assert "opsmith: the kernels cannot be built (exit status 1" in said
    assert not list((wrong / "dist").glob("*.whl"))


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
