"""Library between torch and all kernels: the one that a process takes, and messages without one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaged_kernels import PACKAGE, RUNNABLE, X, build_into, edit_manifest, scaled

import opsmith
from opsmith import errors
from opsmith.build import packaged
from opsmith.core import missing_kernels
from opsmith.kernels.runtime import library as runtime

OWN = Path(opsmith.__file__).parent
pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no level of this machine's processors is known")

Where = Callable[[dict[Path, Path]], None]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "_kernels"
    build_into(folder, cpu=RUNNABLE[0])
    return folder


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(built, tmp_path / name / "_kernels"))

    return copy


@pytest.fixture
def look_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    """Look for built kernels in folders, by package, as a process without a runtime and a compiler."""
    token: Any = None

    def look(folders: dict[Path, Path]) -> None:
        nonlocal token
        token = packaged._search.set(packaged._Search(folders))

    packaged._warned.clear()
    monkeypatch.setattr(missing_kernels, "_warned", False)
    monkeypatch.setattr(runtime, "_file", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    yield look
    packaged._search.reset(token)
    scaled().reload()


def test_opsmith_s_own_comes_before_that_of_the_package(
    copied: Callable[[str], Path], look_in: Where
) -> None:
    own, other = copied("own"), copied("other")
    look_in({OWN: own, PACKAGE: other})
    assert Path(runtime.runtime_file(PACKAGE).path).parent == own
    (library,) = own.glob("opsmith.any.*.so")
    library.unlink()
    assert Path(runtime.runtime_file(PACKAGE).path).parent == own  # a process has one
    runtime._file = None
    with pytest.warns(RuntimeWarning, match="No such file"):
        assert Path(runtime.runtime_file(PACKAGE).path).parent == other


def drop(held: dict[str, Any]) -> None:
    held["files"] = [each for each in held["files"] if each["language"] != "runtime"]


def of_an_older_opsmith(held: dict[str, Any]) -> None:
    held["opsmith"] = "0.0.9"
    for each in held["files"]:
        if each["language"] == "runtime":
            each["digest"] = "0" * 64


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (drop, "opsmith has no built kernels; {folder} does not have this library;"),
        (
            of_an_older_opsmith,
            "opsmith has no built kernels; this opsmith cannot use the library in {package}, which was "
            "built with opsmith 0.0.9;",
        ),
    ],
    ids=["none in the package", "of another opsmith"],
)
def test_a_kernel_that_fits_without_it_is_named_with_what_is_missing(
    edit: Callable[[dict[str, Any]], None],
    said: str,
    copied: Callable[[str], Path],
    look_in: Where,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied("package")
    edit_manifest(folder, edit)
    (library,) = folder.glob("scaled_package.scaled.*.so")
    look_in({OWN: folder.parent / "nothing", PACKAGE: folder})
    operator = scaled()
    operator.reload()
    missing = "the library between torch and all kernels is missing"
    with pytest.warns(RuntimeWarning, match=re.escape(missing)):
        assert torch.equal(operator(X, 3.0), X * 3)
    said = said.format(folder=folder, package=PACKAGE)
    (rejected,) = [each for each in operator.explain(X, 3.0).rejected if "for cpu" in each]
    assert (
        f"{missing}: the kernel fits, and is built into the package for {RUNNABLE[0]}, {library}; "
        f"{said} the library cannot be compiled: there is no C++ compiler: no `no-such-compiler` in "
        "PATH; install a wheel of this opsmith with built kernels, or rebuild the package with this opsmith"
    ) in rejected
    monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "1")
    operator.forget_calls()
    with pytest.raises(errors.KernelRefusedError) as caught:
        operator(X, 3.0)
    assert "got: the library between torch and all kernels is missing: the kernel fits" in str(caught.value)
    assert "hint: install a package with built kernels" in str(caught.value)
