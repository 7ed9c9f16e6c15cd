"""Wheels with built kernels in new environments without a compiler, one for each torch that is tested."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from shipped_wheels import ROOT, SRC

from opsmith.build.processor import best_level

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("wheels"),
    pytest.mark.skipif(
        sys.platform != "linux" or not best_level(), reason="it builds for this machine's level"
    ),
]
NUMBERS = Path(__file__).with_name("shipped_numbers.py")
PINNED = {
    path.stem: re.findall(r"^torch==([\d.]+)", path.read_text(), re.MULTILINE)[0]
    for path in sorted((ROOT / "requirements").glob("*.txt"))
    if re.search(r"^torch==", path.read_text(), re.MULTILINE)
}
"""Version of torch by the name of its environment: `dev` is the one that runs this."""
LEFT_OUT = ("CXX", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH")
"""Variables by which an environment would have more than was installed into it."""


@dataclass(frozen=True)
class Environment:
    """New environment, with nothing else on PATH.

    Attributes:
        folder: The folder.
        cache: Folder of kernels that are built there.
    """

    folder: Path
    cache: Path

    @property
    def site(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, *arguments: str | Path, at: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        return subprocess.run(
            [self.folder / "bin" / "python", *arguments],
            cwd=at,
            env={
                **inherited,
                "PATH": str(self.folder / "bin"),
                "OPSMITH_CACHE": str(self.cache),
                "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor"),
                **variables,
            },
            capture_output=True,
            text=True,
            check=False,
        )


def site_of(name: str) -> Path:
    """The packages of an environment of `make test-all`."""
    if name == "dev":
        return Path(torch.__file__).parents[1]
    found = list(ROOT.glob(f".venv-{name}/lib/python*/site-packages"))
    if not found:
        pytest.skip(f"there is no .venv-{name}: `make test-all` makes it")
    return found[0]


def environment_with(name: str, wheels: list[Path], folder: Path) -> Environment:
    """A new environment with wheels, which finds all other packages in one of `make test-all`.

    Python reads no `.pth` file there: the editable install of opsmith is not found.
    """
    borrowed = site_of(name)
    base = sys.executable if name == "dev" else str(ROOT / f".venv-{name}" / "bin" / "python")
    made = Environment(folder / "environment", folder / "cache")
    for command in (
        [base, "-m", "venv", "--without-pip", made.folder],
        [
            base,
            "-m",
            "pip",
            "--python",
            made.folder,
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            *wheels,
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (made.site / "borrowed.pth").write_text(f"{borrowed}\n")
    return made


@pytest.fixture(params=PINNED, ids=[f"torch {version}" for version in PINNED.values()], scope="module")
def environment(
    request: pytest.FixtureRequest,
    opsmith_wheel: Path,
    platform_wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Environment:
    site_of(request.param)  # before anything is built
    return environment_with(
        request.param, [opsmith_wheel, platform_wheel], tmp_path_factory.mktemp(request.param)
    )


@pytest.fixture(scope="module")
def numbers(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """What the sources give in this environment, with its compiler."""
    file = tmp_path_factory.mktemp("numbers") / "numbers.pt"
    done = subprocess.run(
        [sys.executable, NUMBERS, file],
        env={**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{project / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert not [each for each in said["origins"].values() if each.startswith("built into")], said
    loaded: dict[str, list[torch.Tensor]] = torch.load(file)
    return loaded


def test_kernels_of_wheels_compute_what_the_sources_do(
    environment: Environment,
    numbers: dict[str, list[torch.Tensor]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    file = tmp_path / "numbers.pt"
    strict = ("-W", "error::RuntimeWarning")
    done = environment.run(*strict, NUMBERS, file, at=tmp_path, OPSMITH_REQUIRE_KERNELS="1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["compiler"] == "there is no C++ compiler"
    assert said["torch"].partition("+")[0] in PINNED.values()
    for module in ("opsmith", "wheeled"):
        assert said["files"][module] == str(environment.site / module / "__init__.py")
    assert {each.rpartition(" ")[0] for each in said["origins"].values()} == {"built into the package for"}
    assert len(said["runtimes"]) == 1, said["runtimes"]
    assert not list(environment.cache.rglob("*.so"))
    found: dict[str, list[torch.Tensor]] = torch.load(file)
    assert found.keys() == numbers.keys()
    for name, tensors in found.items():
        for tensor, expected in zip(tensors, numbers[name], strict=True):
            torch.testing.assert_close(tensor, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_the_packages_own_tests_pass(environment: Environment, project: Path, tmp_path: Path) -> None:
    """`pytest`, with `--opsmith` by its settings; `src` is not there, so what it tests is installed."""
    shutil.copytree(project / "tests", tmp_path / "tests")
    shutil.copy(project / "pyproject.toml", tmp_path)
    done = environment.run("-m", "pytest", "-v", "-p", "no:cacheprovider", at=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("the_kernel_in_cpp_computes_and_not_the_reference", "swish::forward", "swish::gradient"):
        assert f"{name} PASSED" in done.stdout
    assert not list(environment.cache.glob("*/*.so")), "no kernel was built"
