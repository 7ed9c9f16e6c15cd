"""`opsmith new`: the files of a package by its options, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import opsmith
from opsmith import errors
from opsmith.cli.app import app
from opsmith.scaffolding import LICENCES, OpsmithSource, new_package, opsmith_source
from opsmith.scaffolding.new_package import LONGEST, TEMPLATE, version_range

ALWAYS = [
    ".gitignore",
    "README.md",
    "build_backend.py",
    "pyproject.toml",
    "src/fast_math/__init__.py",
    "src/fast_math/ops.py",
    "src/fast_math/py.typed",
    "src/fast_math/swish.cpp",
    "tests/test_ops.py",
]
CUDA, CI, LICENSE = "src/fast_math/swish.cu", ".github/workflows/test.yml", "LICENSE"
CHECKOUT, INDEX = OpsmithSource(), OpsmithSource(indexed=True)
FOLDER = OpsmithSource("file:///home/me/opsmith")
REPOSITORY = OpsmithSource("git+https://host/opsmith.git@1a2b")


@pytest.fixture(autouse=True)
def _source(monkeypatch: pytest.MonkeyPatch) -> None:
    come_from(monkeypatch, CHECKOUT)


def come_from(monkeypatch: pytest.MonkeyPatch, source: OpsmithSource) -> None:
    module = sys.modules["opsmith.scaffolding.new_package"]
    monkeypatch.setattr(module, "opsmith_source", lambda: source)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["new", *arguments], prog_name="opsmith")


def texts(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ((), [*ALWAYS, CUDA, CI, LICENSE]),
        (("--no-cuda",), [*ALWAYS, CI, LICENSE]),
        (("--no-ci",), [*ALWAYS, CUDA, LICENSE]),
        (("--licence", "none"), [*ALWAYS, CUDA, CI]),
        (("--no-cuda", "--no-ci", "--license", "none"), ALWAYS),
    ],
    ids=["everything", "no-cuda", "no-ci", "no-licence", "nothing"],
)
def test_files_of_the_options(tmp_path: Path, options: tuple[str, ...], files: list[str]) -> None:
    folder = tmp_path / "here"
    done = run("fast-math", str(folder), *options)
    assert done.exit_code == 0, done.output
    written = texts(folder)
    assert sorted(written) == sorted(files)
    assert [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")][
        : len(files)
    ] == sorted(files)
    assert done.stdout.startswith(f"{folder}: {len(files)} files\n")
    for name, text in written.items():
        assert not re.search(r"my.kernels|^(#|<!--) </?\w+>|LICENCE|REFERENCE", text, re.MULTILINE), name
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), name
        assert "\n\n\n\n" not in text, name
    assert list(tmp_path.iterdir()) == [folder]


def test_what_is_left_out_is_named_nowhere(tmp_path: Path) -> None:
    new_package("fast-math", tmp_path / "a", cuda=False, ci=False, licence="none")
    for name, text in texts(tmp_path / "a").items():
        assert not re.search(r"cuda(?! libraries)|nvrtc|licen[cs]e|github", text, re.IGNORECASE), name


@pytest.mark.parametrize("licence", LICENCES[:-1])
def test_licence(tmp_path: Path, licence: str) -> None:
    new_package("fast-math", tmp_path / "a", licence=licence)
    text = (tmp_path / "a" / "LICENSE").read_text()
    assert {"MIT": "MIT License", "Apache-2.0": "Apache License", "BSD-3-Clause": "BSD 3-Clause"}[
        licence
    ] in text
    assert licence == "Apache-2.0" or re.search(
        r"^Copyright \(c\) 20\d\d,? the authors of fast-math$", text, re.M
    )
    assert project(tmp_path / "a")["license"] == licence


def project(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


def test_the_folder_is_named_as_the_package_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("fast-math")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "fast-math" / "src" / "fast_math" / "ops.py").is_file()
    assert done.stdout.endswith("Next:\n  cd fast-math\n  pip install -e '.[dev]'\n  pytest\n")


@pytest.mark.parametrize(
    ("source", "dev", "told", "in_workflow"),
    [
        (INDEX, "opsmith[cli,cuda,test]", None, False),
        (CHECKOUT, "opsmith[cli,cuda,test]", "needs opsmith in its environment", True),
        (FOLDER, f"opsmith[cli,cuda,test] @ {FOLDER.reference}", f"takes it from {FOLDER.reference}", True),
        (
            REPOSITORY,
            f"opsmith[cli,cuda,test] @ {REPOSITORY.reference}",
            f"takes it from {REPOSITORY.reference}",
            False,
        ),
    ],
    ids=["index", "checkout", "folder", "repository"],
)
def test_source_of_opsmith(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: OpsmithSource,
    dev: str,
    told: str | None,
    in_workflow: bool,
) -> None:
    come_from(monkeypatch, source)
    done = run("fast-math", str(tmp_path / "a"))
    assert done.exit_code == 0, done.output
    written = texts(tmp_path / "a")
    table = tomllib.loads(written["pyproject.toml"])
    assert table["project"]["optional-dependencies"]["dev"][0] == dev
    assert table["project"]["dependencies"] == [f"opsmith{version_range(opsmith.__version__)}"], (
        "what users need"
    )
    direct = bool(source.reference)
    assert table["tool"]["hatch"].get("metadata", {}) == ({"allow-direct-references": True} if direct else {})
    assert ("no package index" in written["README.md"]) is (told is not None)
    assert (source.reference in written["README.md"]) is True
    assert ("which this machine does not have" in written[CI]) is in_workflow
    assert ("cannot reach it" in done.stdout) is in_workflow
    assert told is None or told in done.stdout
    assert "cannot reach it" not in run("fast-math", str(tmp_path / "b"), "--no-ci").stdout


@pytest.mark.parametrize(
    ("recorded", "source"),
    [
        (None, INDEX),
        ({"url": "file:///opsmith", "dir_info": {"editable": True}}, CHECKOUT),
        ({"url": "file:///home/me/opsmith", "dir_info": {}}, FOLDER),
        (
            {"url": "file:///a/opsmith-0.1.0.whl", "archive_info": {}},
            OpsmithSource("file:///a/opsmith-0.1.0.whl"),
        ),
        (
            {"url": "https://host/opsmith.git", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}},
            REPOSITORY,
        ),
        (
            {"url": "https://h/o.git", "vcs_info": {"vcs": "git", "commit_id": "1"}, "subdirectory": "lib"},
            OpsmithSource("git+https://h/o.git@1#subdirectory=lib"),
        ),
    ],
    ids=["index", "editable", "folder", "wheel", "repository", "subdirectory"],
)
def test_source_that_pip_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: dict[str, Any] | None, source: OpsmithSource
) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if recorded is None else json.dumps(recorded)

    monkeypatch.setattr(opsmith, "__file__", str(tmp_path / "site-packages" / "opsmith" / "__init__.py"))
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    assert opsmith_source() == source


def test_a_checkout_is_no_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(opsmith, "__file__", str(tmp_path / "src" / "opsmith" / "__init__.py"))
    assert opsmith_source() == CHECKOUT

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(opsmith, "__file__", str(tmp_path / "elsewhere" / "opsmith" / "__init__.py"))
    monkeypatch.setattr(metadata, "distribution", missing)
    assert opsmith_source() == CHECKOUT


@pytest.mark.parametrize(
    ("name", "got", "hint"),
    [
        ("Fast Math!", "'Fast Math!'", "take `fast-math`"),
        ("3d", "'3d'", "take `d`"),
        ("a--b", "'a--b'", "take `a-b`"),
        ("-", "'-'", "take a name such as `fast-attention`"),
        ("", "''", "take a name such as `fast-attention`"),
        ("a" * (LONGEST + 1), repr("a" * (LONGEST + 1)), f"take `{'a' * LONGEST}`"),
        ("../out", "'../out'", "take `out`"),
    ],
)
def test_a_name_that_is_none(tmp_path: Path, name: str, got: str, hint: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        new_package(name, tmp_path / "a")
    expected = (
        "small letters and digits, with single `-` or `_` between them; the first character is "
        f"a letter; at most {LONGEST} characters"
    )
    assert caught.value.message() == (
        f"`{name}` is not a valid package name\n"
        f"  argument: NAME\n  expected: {expected}\n  got: {got}\n  hint: {hint}"
    )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("lambda", "`lambda` is a word of Python's syntax"),
        ("json", "Python has a module `json`"),
        ("concurrent", "Python has a module `concurrent`"),
        ("tests", "the folder `tests` of the new package would have the same name"),
        ("prim", "torch has operators in a namespace `prim`"),
        ("aten", "torch has operators in a namespace `aten`"),
        ("prims", "torch has operators in a namespace `prims`"),
        ("torch", "torch has operators in a namespace `torch`"),
        ("opsmith", f"`import opsmith` finds {opsmith.__file__}"),
        ("pytest-opsmith", "`import pytest_opsmith` finds "),
    ],
)
def test_a_name_that_is_taken(tmp_path: Path, name: str, because: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        new_package(name, tmp_path / "a")
    assert str(caught.value).startswith(f"a package cannot be named `{name}`: {because}")
    assert caught.value.message().endswith(
        "  argument: NAME\n  expected: a name that is not in use\n"
        f"  got: {name}\n  hint: choose a different name, such as `{name}-kernels`"
    )
    assert not (tmp_path / "a").exists()


def places(tmp_path: Path) -> Iterator[tuple[Path, str, str]]:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to("nowhere")
    yield (
        tmp_path / "folder",
        "a folder of this name exists already",
        "name a different folder: `opsmith new NAME DIR`",
    )
    yield (
        tmp_path / "file",
        "a file of this name exists already",
        "name a different folder: `opsmith new NAME DIR`",
    )
    yield (
        tmp_path / "broken",
        "a file of this name exists already",
        "name a different folder: `opsmith new NAME DIR`",
    )
    yield tmp_path / "no" / "a", f"there is no folder `{tmp_path / 'no'}`", "make that folder first"
    yield tmp_path / "file" / "a", f"there is no folder `{tmp_path / 'file'}`", "make that folder first"
    yield tmp_path / ("a" * 300), "File name too long", "name a different folder"


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    for folder, got, hint in places(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(errors.UsageError) as caught:
            new_package("fast-math", folder)
        assert caught.value.message() == (
            f"the package cannot be written to `{folder}`\n"
            "  argument: DIR\n"
            "  expected: a folder that does not exist yet, inside a folder that can be written to\n"
            f"  got: {got}\n  hint: {hint}"
        )
        assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes none")
def test_a_folder_that_the_system_refuses() -> None:
    with pytest.raises(
        errors.UsageError, match="got: No such file or directory\n  hint: name a different folder"
    ):
        new_package("fast-math", Path("/proc/a"))


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def filled(self: Path, *arguments: Any, **options: Any) -> int:
        if self.name == "ops.py":
            raise OSError(28, "No space left on device")
        return write(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", filled)
    with pytest.raises(errors.UsageError, match="got: No space left on device"):
        new_package("fast-math", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_licence_that_differs_in_case_alone(tmp_path: Path) -> None:
    done = run("fast-math", str(tmp_path / "a"), "--licence", "mit")
    assert done.stderr.endswith("  hint: take `MIT`\n  more: opsmith rule UsageError\n")


def test_a_licence_that_is_none(tmp_path: Path) -> None:
    done = run("fast-math", str(tmp_path / "a"), "--licence", "GPL")
    assert done.exit_code == 2
    assert done.stderr == (
        "opsmith: there is no licence `GPL` to choose\n  argument: --licence\n"
        "  expected: MIT, Apache-2.0, BSD-3-Clause, none\n  got: GPL\n"
        "  hint: choose `none`, and add your own licence later\n"
        "  more: opsmith rule UsageError\n"
    )
    assert not (tmp_path / "a").exists()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The whole package, and one with a long name and nothing that can be left out."""
    folder = tmp_path_factory.mktemp("packages")
    new_package("scaffolded", folder / "whole")
    new_package("a" * LONGEST, folder / "small", cuda=False, ci=False, licence="none")
    return [folder / "whole", folder / "small"]


def tool(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(opsmith.__file__).parents[1]), str(folder / "src")]),
            "MYPYPATH": str(Path(opsmith.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ruff_has_nothing_to_say(packages: list[Path]) -> None:
    pytest.importorskip("ruff", reason="ruff reads the same files with every torch: dev.txt alone has it")
    for folder in packages:
        tool(folder, "ruff", "check", "--no-cache", ".")
        tool(folder, "ruff", "format", "--no-cache", "--check", ".")


def test_the_operator_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick part of what a package's own suite tests, on the template itself."""
    monkeypatch.syspath_prepend(str(TEMPLATE / "src"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    from my_kernels import Swish, swish

    report = opsmith.check(swish, effort="quick", only=["forward", "gradient"])
    assert report.passed, str(report)
    assert "kernel for cpu" in str(swish.explain(torch.ones(2, 3), torch.ones(3)).forward)
    assert Swish(2)(torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.slow
def test_the_suite_of_the_package_passes(packages: list[Path]) -> None:
    for folder in packages:
        printed = tool(folder, "pytest", "-q", "-p", "pytest_opsmith", "-p", "no:cacheprovider")
        assert "failed" not in printed
        assert "passed" in printed
        assert "unverified" not in printed


@pytest.mark.slow
def test_mypy_has_nothing_to_say(packages: list[Path], tmp_path: Path) -> None:
    for folder in packages:
        tool(folder, "mypy", "--cache-dir", str(tmp_path))


@pytest.mark.slow
def test_opsmith_check_passes(packages: list[Path]) -> None:
    assert "scaffolded::swish: passed" in tool(packages[0], "opsmith", "check", "scaffolded")


BACK_END = """
import json, os, sys
import build_backend
wheel = build_backend.get_requires_for_build_wheel()
sdist = build_backend.get_requires_for_build_sdist()
editable = build_backend.get_requires_for_build_editable()
print(json.dumps([wheel, sdist, editable, build_backend.build_editable(sys.argv[1])]))
"""


def test_a_wheel_needs_opsmith_to_be_built_and_an_editable_install_does_not(tmp_path: Path) -> None:
    new_package("fast-math", tmp_path / "a")
    done = subprocess.run(
        [sys.executable, "-c", BACK_END, str(tmp_path)],
        cwd=tmp_path / "a",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "a")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wheel, sdist, editable, name = json.loads(done.stdout)
    assert wheel == [f"opsmith[cli,cuda]{version_range(opsmith.__version__)}"]
    assert sdist == []
    assert not [each for each in editable if "opsmith" in each]
    assert name == "fast_math-0.1.0-py3-none-any.whl"
