"""The compiler that is found, what decides a library's key, and what is said where it does not run."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsmith import config, errors
from opsmith.build import toolchain
from opsmith.build.toolchain import cpu_model, find_toolchain


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    toolchain._toolchain.cache_clear()
    yield
    toolchain._toolchain.cache_clear()


def program(directory: Path, name: str, script: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


def test_the_first_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.ToolchainError, match=r"expected: one of g\+\+, clang\+\+, c\+\+"):
        find_toolchain()
    other = program(tmp_path, "c++", "exit 0")
    assert find_toolchain().command == (str(other),)
    toolchain._toolchain.cache_clear()
    preferred = program(tmp_path, "g++", "exit 0")
    assert find_toolchain().command == (str(preferred),)


def test_what_cxx_names_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, "my c++", "exit 0")
    monkeypatch.setenv("CXX", f"'{path}' -Wall")
    found = find_toolchain()
    assert found.command == (str(path), "-Wall")
    before = found.identity
    path.write_text("#!/bin/sh\nexit 1\n")
    toolchain._toolchain.cache_clear()
    assert find_toolchain().identity != before  # another version of it


def test_one_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, "broken", "exit 0")
    path.write_text("no program")
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(errors.ToolchainError) as caught:
        find_toolchain().run(["x.cpp"], tmp_path)
    assert str(caught.value).splitlines()[0] == "the C++ compiler does not run"
    assert f"got: {path}: " in str(caught.value)
    assert f"hint: see that `{path} --version` works" in str(caught.value)


def test_one_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "endless", "exec sleep 60")))
    monkeypatch.setattr(toolchain, "LIMIT_S", 0.2)
    with pytest.raises(errors.ToolchainError, match=r"timed out after 0\.2 seconds"):
        find_toolchain().run([], tmp_path)


def test_a_full_disk_is_no_word_about_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "/tmp/x.s: fatal error: error writing to x.s: No space left on device"
    monkeypatch.setenv("CXX", str(program(tmp_path, "full", f"echo '{said}' >&2; exit 1")))
    with pytest.raises(OSError, match="No space left on device") as caught:
        find_toolchain().run([], tmp_path)
    assert caught.value.errno == errno.ENOSPC


def test_a_directory_that_went_away_is_no_fault_of_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "there", "exit 0")))
    with pytest.raises(FileNotFoundError):
        find_toolchain().run([], tmp_path / "gone")


def test_it_speaks_one_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("CXX", str(program(tmp_path, "speaking", 'echo "$LC_ALL $1"')))
    done = find_toolchain().run(["x"], tmp_path)
    assert (done.status, done.printed) == (0, "C x\n")


def test_the_processor_has_a_name() -> None:
    assert cpu_model()
    assert "MHz" not in cpu_model()  # which changes by the second


@pytest.mark.parametrize(
    ("variables", "directory"),
    [
        ({"OPSMITH_CACHE": "/a/b"}, "/a/b"),
        ({"OPSMITH_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/opsmith"),
        ({"HOME": "/d"}, "/d/.cache/opsmith"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="Windows has other places")
def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], directory: str
) -> None:
    for name in ("OPSMITH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config.cache_directory() == Path(directory)


def test_a_relative_directory_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPSMITH_CACHE", "here")
    assert config.cache_directory() == tmp_path / "here"


def test_the_runtime_that_no_compiler_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.build.cache import Cache
    from opsmith.kernels.cpp import compiler

    monkeypatch.setenv("CXX", str(program(tmp_path, "old", "echo 'no C++17 here'; exit 1")))
    monkeypatch.setattr(compiler, "cache_on_disk", lambda: Cache(tmp_path / "cache"))
    with pytest.raises(errors.ToolchainError) as caught:
        compiler.compile_runtime()
    assert str(caught.value).splitlines() == [
        "the C++ compiler does not compile opsmith's own library",
        "  expected: a compiler of C++17, as g++ 9 or clang 10",
        "  got: no C++17 here",
        "  hint: name another compiler in CXX",
    ]


def test_on_other_systems_there_are_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.kernels.cpp import compiler

    monkeypatch.setattr(compiler.sys, "platform", "win32")
    with pytest.raises(errors.ToolchainError, match=r"C\+\+ kernels are not built on win32 yet"):
        compiler.compile_runtime()


def test_the_version_of_python_is_that_of_the_header() -> None:
    from opsmith.kernels.common import parameters
    from opsmith.kernels.cpp import compiler, dispatch

    exported: Any = dispatch._runtime().opsmith_version()
    assert exported == dispatch.VERSION
    names = [each.strip() for each in _enumerators(compiler.HEADER.read_text(), "ParameterType")]
    assert len(names) == len(parameters.PARAMETER_TYPES)
    assert len(_enumerators(compiler.HEADER.read_text(), "Layout")) == len(parameters.LAYOUTS)


def _enumerators(text: str, name: str) -> list[str]:
    return text.partition(f"enum {name} : int32_t {{")[2].partition("}")[0].split(",")


def test_no_header_of_torch_is_read(tmp_path: Path) -> None:
    from opsmith.kernels.cpp import compiler

    command = [*find_toolchain().command, "-std=c++17", "-H", "-fsyntax-only", str(compiler.RUNTIME)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    own = {str(path) for path in (compiler.HEADER, *compiler.RUNTIME_HEADERS)}
    read = {line.lstrip(". ") for line in done.stderr.splitlines() if line.startswith(".")}
    assert own <= read
    assert not [path for path in read - own if "torch" in path or "pybind" in path or "Python.h" in path]
