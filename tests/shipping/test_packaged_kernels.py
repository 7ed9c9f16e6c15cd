"""Kernels that lie built in a package: which is used, and what happens to one that cannot be."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packaged_kernels
import pytest
import torch
from packaged_kernels import (
    PACKAGE,
    RUNNABLE,
    X,
    build_into,
    edit_manifest,
    origin_in,
    scaled,
)

import opsmith
from opsmith.build import manifest, packaged, processor
from opsmith.build.cache import CacheEntry
from opsmith.build.toolchain import FLAGS
from opsmith.kernels.cpp.compiler import build_flags, building_with, compile_kernel
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cpp.source import CppSource
from opsmith.kernels.runtime.loading import LIBRARY

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no level of this machine's processors is known")
ELSEWHERE = ("from the cache", "compiled now")
"""Origins of a kernel that no package serves."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "_kernels"
    build_into(folder, cpu=",".join(RUNNABLE[:2]))
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy to damage; its warnings are new."""
    copy = tmp_path / "_kernels"
    shutil.copytree(built, copy)
    packaged._warned.clear()
    return copy


def library(folder: Path) -> Path:
    """The best library in a folder."""
    return sorted(folder.glob("*.so"))[-1]


def test_the_best_level_of_this_processor_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert origin_in(folder) == f"built into the package for {RUNNABLE[:2][-1]}"
    monkeypatch.setattr(manifest, "cpu_features", lambda: frozenset(processor.levels()[RUNNABLE[0]]))
    assert origin_in(folder) == f"built into the package for {RUNNABLE[0]}"
    monkeypatch.setattr(manifest, "cpu_features", frozenset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another processor is no fault
        assert origin_in(folder) in ELSEWHERE


def test_the_out_form_shares_the_library(folder: Path) -> None:
    names = [each.name.split(".")[1] for each in sorted(folder.glob("*.so"))]
    names = [each for each in names if not each.startswith("torch-")]  # calls in C++, where they are built
    assert names == ["any", *["scaled"] * len(RUNNABLE[:2])]  # the first is the runtime
    operator = scaled()
    with packaged.looking_in(PACKAGE, folder, RUNNABLE):
        operator.reload()
        out = torch.empty(3)
        operator.out(X, 3.0, out=out)
        said = operator.out_operator.explain(X, 3.0, out=out)
    operator.reload()
    assert torch.equal(out, X * 3)
    assert said.origin == f"built into the package for {RUNNABLE[:2][-1]}"
    assert f"\n    origin: {said.origin}\n" in str(said)


@pytest.mark.slow
def test_a_build_with_other_flags_uses_no_package(folder: Path) -> None:
    with building_with((*FLAGS, "-DOTHER")):
        assert origin_in(folder) in ELSEWHERE


def compiled_in(root: Path, *, shipped: bool = True, raised_by: int = 1) -> CacheEntry:
    """A kernel with a header, compiled in a package that lies in a folder."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "__init__.py").touch()
    (root / "raised.h").write_text(f"inline float raised(float x) {{ return x + {raised_by}; }}\n")
    text = """#include "raised.h"
    void f(Contiguous<const float> x, Contiguous<float> y) {
      OPSMITH_CHECK(x.dim, __FILE__);
      y[0] = raised(x[0]);
    }
    """
    source = CppSource(text, "f", False, str(root / "f.cpp"), 1, 2, folder=str(root))
    flags = [flag for flag in FLAGS if not flag.startswith("-g")] if shipped else FLAGS
    with building_with(flags, ("-g0",), home=root / "_kernels" if shipped else None):
        return compile_kernel(source, "copied_package::f", ())


def test_a_package_that_lies_elsewhere_has_the_same_entries_of_the_cache(tmp_path: Path) -> None:
    one, other = tmp_path / "one" / "package", tmp_path / "other" / "package"
    made = compiled_in(one)
    assert compiled_in(other).directory == made.directory
    assert str(tmp_path).encode() not in (made.directory / LIBRARY).read_bytes()


@pytest.mark.parametrize(("root", "home"), [("/package", "/"), ("/home/me/package", "/home/me/")])
def test_paths_are_built_without_the_folder_that_holds_the_package(root: str, home: str) -> None:
    with building_with((), home=Path(root) / "_kernels"):
        assert build_flags() == (f"-ffile-prefix-map={home}=",)


@pytest.mark.slow
def test_another_header_makes_another_entry(tmp_path: Path) -> None:
    one, other = tmp_path / "one" / "package", tmp_path / "other" / "package"
    made = compiled_in(one)
    assert compiled_in(other, raised_by=2).directory != made.directory
    assert compiled_in(one).directory == made.directory
    assert compiled_in(one, shipped=False).directory != compiled_in(other, shipped=False).directory


def truncate(folder: Path) -> str:
    path = library(folder)
    path.write_bytes(path.read_bytes()[:1000])
    return f"{path} is not used: it has 1000 of "


def change(folder: Path) -> str:
    path = library(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return f"{path} is not used: its content has changed since the build"


def remove(folder: Path) -> str:
    path = library(folder)
    path.unlink()
    return f"{path} is not used: No such file"


def link(folder: Path) -> str:
    path = library(folder)
    path.rename(folder.parent / "elsewhere.so")
    path.symlink_to(folder.parent / "elsewhere.so")
    return f"{path} is not used: it is a link"


def open_file(folder: Path) -> str:
    library(folder).chmod(0o666)
    return f"{library(folder)} is not used: its mode is 666, so others can write into it"


def open_folder(folder: Path) -> str:
    folder.chmod(0o777)
    return f"{folder} are not used: its mode is 777, so others can write into it"


def link_folder(folder: Path) -> str:
    folder.rename(folder.parent / "real")
    folder.symlink_to(folder.parent / "real")
    return f"{folder} are not used: it is a link"


def damage_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"version": 2, "files": [')
    return f"{folder}/manifest.json are not used: it is damaged: "


def shorten_manifest(folder: Path) -> str:
    edit_manifest(folder, lambda held: held["files"][0].pop("sha256"))
    return f"{folder}/manifest.json are not used: it is damaged: it lacks 'sha256'"


def renew_manifest(folder: Path) -> str:
    edit_manifest(folder, lambda held: held.update(version=manifest.VERSION + 1))
    return f"it has version {manifest.VERSION + 1}, but this opsmith reads {manifest.VERSION}"


def lose_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return f"{folder}/manifest.json are not used: it is missing"


def lead_up(folder: Path) -> str:
    shutil.copy(library(folder), folder.parent / "other.so")
    edit_manifest(folder, lambda held: held["files"][0].update(file="../other.so"))
    return f"{folder}/manifest.json are not used: it is damaged: `../other.so` is not the name of a file"


def lead_away(folder: Path) -> str:
    edit_manifest(folder, lambda held: held["files"][0].update(file=str(library(folder))))
    return f"it is damaged: `{library(folder)}` is not the name of a file in this folder"


def lead_headers_out(folder: Path) -> str:
    edit_manifest(folder, lambda held: held["files"][0].update(headers={"../other.h": "0"}))
    return "it is damaged: `../other.h` is not the path of a file in this package"


def older_structures(folder: Path) -> str:
    edit_manifest(folder, lambda held: [each.update(abi=3) for each in held["files"]])
    return "is not used: built for version 3 of opsmith's kernels, but this opsmith has "


def no_library(folder: Path) -> str:
    path = library(folder)
    path.write_bytes(b"no library")
    digest = manifest.digest_of(path)
    edit_manifest(
        folder,
        lambda held: [
            each.update(sha256=digest, bytes=10) for each in held["files"] if each["file"] == path.name
        ],
    )
    return f"{path} is not used: it cannot be loaded: {path}: "


OF_ONE_FILE = (truncate, change, remove, link, open_file, no_library)
OF_ALL = (
    open_folder,
    link_folder,
    damage_manifest,
    shorten_manifest,
    renew_manifest,
    lose_manifest,
    lead_up,
    lead_away,
    lead_headers_out,
    older_structures,
)


@pytest.mark.parametrize("damage", [*OF_ONE_FILE, *OF_ALL], ids=lambda damage: damage.__name__)
def test_what_is_damaged_is_not_used_and_named_once(damage: Callable[[Path], str], folder: Path) -> None:
    expected = damage(folder)
    with pytest.warns(RuntimeWarning) as warned:
        found = origin_in(folder)
    assert [str(each.message).count(expected) for each in warned] == [1], [
        str(each.message) for each in warned
    ]
    another = damage in OF_ONE_FILE and len(RUNNABLE) > 1
    assert found in ((f"built into the package for {RUNNABLE[0]}",) if another else ELSEWHERE)
    assert {each.filename for each in warned} == {packaged_kernels.__file__}  # the line of the call
    assert origin_in(folder) == (found if another else "from the cache")  # and says no more


def test_the_reason_names_each_file_that_would_fit_before_those_that_do_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler: the warnings may be lost, the error and `explain` may not."""
    best = library(folder)
    edit_manifest(
        folder,
        lambda held: [
            each.update(features=["vax"] if each["file"] != best.name else []) for each in held["files"][1:]
        ],
    )
    best.write_bytes(b"")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "1")
    operator = scaled()
    with packaged.looking_in(PACKAGE, folder, RUNNABLE):
        operator.reload()
        with (
            pytest.warns(RuntimeWarning, match="is not used: it has 0 of"),
            pytest.raises(opsmith.errors.KernelRefusedError) as caught,
        ):
            operator(X, 3.0)
    operator.reload()
    got = str(caught.value.got)
    assert f"in PATH; {best} is not used: it has 0 of " in got, got
    if len(RUNNABLE) > 1:
        assert got.endswith(f"; {RUNNABLE[0]} needs vax, which this processor lacks")


def test_a_warning_that_is_an_error_is_raised_by_each_call(folder: Path) -> None:
    damage_manifest(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(RuntimeWarning, match="it is damaged"):
                origin_in(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda held: [each.update(digest="0" * 64) for each in held["files"]],
        lambda held: [each.update(machine="linux-vax") for each in held["files"]],
        lambda held: [each.update(operator="scaled_package::other") for each in held["files"]],
    ],
    ids=["edited source", "another machine", "another operator"],
)
def test_what_is_of_something_else_is_passed_over_in_silence(
    edit: Callable[[dict[str, object]], None], folder: Path
) -> None:
    edit_manifest(folder, edit)
    assert origin_in(folder) in ELSEWHERE


def kernel_of(operator: opsmith.Operator[..., object]) -> CppKernel:
    (found,) = [each.given for each in operator.specification.kernels if isinstance(each.given, CppKernel)]
    return found


def test_the_digest_is_of_all_that_the_author_wrote_and_of_no_place(tmp_path: Path) -> None:
    """Text, headers, name, dtypes and signature change it; the folder and declared shapes do not."""

    def digest(number: int, *, shapes: str | None = "x: N -> N", flags: Any = None, **changed: str) -> str:
        place = tmp_path / str(number)
        shutil.copytree(PACKAGE, place)
        for name, text in changed.items():
            (place / name.replace("_", ".")).write_text(text)

        @opsmith.operator(f"scaled_package::digest_{number}", shapes=shapes)
        def copy(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
            return x * by

        copy.kernel("cpu", cpp_file=place / "scaled.cpp", entry="scaled", flags=flags)
        return kernel_of(copy).digest()

    header = (PACKAGE / "product.h").read_text()
    same = digest(0)
    assert same == digest(1)
    changed = [
        digest(2, product_h=header + "\n"),
        digest(3, scaled_cpp=(PACKAGE / "scaled.cpp").read_text().replace("i++", "++i")),
        digest(4, flags=["-ffast-math"]),
    ]
    assert len({same, *changed}) == 4
    assert digest(5, shapes=None) == same
    machine = [f"-L{tmp_path}", f"--sysroot={tmp_path}", f"-B{tmp_path}"]
    assert digest(6, flags=machine) == same


def test_other_files_of_a_package_are_no_more_open_than_its_code(tmp_path: Path) -> None:
    code, file = tmp_path / "__init__.py", tmp_path / "kernel.so"
    for path in (code, file):
        path.touch()
        path.chmod(0o664)  # as by pip under a umask of 002
    manifest.refuse_open(file, code.stat())
    code.chmod(0o644)
    with pytest.raises(manifest.UnusableError, match="its mode is 664"):
        manifest.refuse_open(file, code.stat())
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        file.chmod(stat.S_IRUSR)
        with pytest.raises(manifest.UnusableError, match="it belongs to user 12345, but the package to 0"):
            manifest.refuse_open(file, code.stat())


def test_only_a_file_in_a_package_has_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for name in ("ops.py", "__init__.py"):
        (inner / name).touch()
    assert packaged.package_of(str(inner / "ops.py")) == inner
    (inner.parent / "__init__.py").touch()
    assert packaged.package_of(str(inner / "ops.py")) == inner.parent
    assert packaged.package_of(str(tmp_path / "alone.py")) is None
    monkeypatch.chdir(inner)
    assert packaged.package_of("ops.py") == inner.parent
    assert packaged.package_of("<stdin>") is None
    assert packaged.package_of(None) is None


@pytest.mark.slow
def test_without_a_compiler_or_a_cache_an_installed_package_computes(tmp_path: Path, built: Path) -> None:
    """A copy of opsmith without built kernels, and of the package; in the process there is no compiler."""
    site = tmp_path / "site"
    shutil.copytree(
        Path(opsmith.__file__).parent, site / "opsmith", ignore=shutil.ignore_patterns("_kernels")
    )
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(built, site / PACKAGE.name / "_kernels")
    script = (
        "import torch, scaled_package\n"
        "x = torch.arange(3.0)\n"
        "scaled_package.scaled.require_kernel('cpu')\n"
        "assert torch.equal(scaled_package.scaled(x, 3.0), x * 3)\n"
        "print(scaled_package.scaled.explain(x, 3.0).origin)\n"
    )
    environment = {"PYTHONPATH": str(site), "OPSMITH_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == (f"built into the package for {RUNNABLE[:2][-1]}\n", "")
    assert not (tmp_path / "cache").exists()
