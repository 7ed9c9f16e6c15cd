"""Wheels of opsmith and of a package of `opsmith new`, by the build hook."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import opsmith
from opsmith.build.processor import best_level
from opsmith.scaffolding import new_package

SRC = Path(opsmith.__file__).parents[1]
ROOT = SRC.parent
PURE = {"OPSMITH_PURE_WHEEL": "1"}
_METADATA = "Metadata-Version: 2.1\nName: hook-of-tests\nVersion: 0\n"
_ENTRY_POINTS = "[hatch]\nopsmith = hatch_opsmith\n"
_TABLE = "[tool.hatch.build.targets.wheel.hooks.opsmith]\n"


def new_project(folder: Path) -> Path:
    """A new package `wheeled` whose hook builds for this machine's level alone."""
    project = folder / "wheeled"
    new_package("wheeled", project, cuda=False)
    replace_in(project / "pyproject.toml", _TABLE, f'{_TABLE}cpu = "{best_level()}"\n')
    return project


def opsmith_project(folder: Path) -> Path:
    """This checkout, whose hook builds for this machine's level and does not verify, as other tests do."""
    project = folder / "opsmith"
    shutil.copytree(SRC, project / "src", ignore=shutil.ignore_patterns("__pycache__", "_kernels"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    levels = 'cpu = "x86-64-v3,x86-64-v4"\n'
    replace_in(project / "pyproject.toml", levels, f'cpu = "{best_level()}"\nverify = false\n')
    return project


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def run_hatchling(project: Path, into: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel with the hook of this checkout, as if that were installed."""
    hook = into / "hook"
    metadata = hook / "hook_of_tests-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(_METADATA)
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    shutil.rmtree(into / "dist", ignore_errors=True)
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(into / "dist")],
        cwd=project,
        env={**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{hook}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def built_wheel(project: Path, into: Path, **variables: str) -> Path:
    """The wheel, in the folder `dist` of a folder."""
    done = run_hatchling(project, into, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (into / "dist").iterdir()
    return path
