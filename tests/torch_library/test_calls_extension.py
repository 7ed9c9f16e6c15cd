"""The extension for calls in C++: how it is found, what is said where it cannot be built or loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import opsmith
from opsmith import errors
from opsmith.build.cache import Cache, cache_on_disk
from opsmith.build.manifest import write_manifest
from opsmith.build.packaged import looking_in, package_of
from opsmith.shipping.builder import build_calls
from opsmith.shipping.package_build import write_named_by_content
from opsmith.torch_library import calls_extension as extension


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a search that has found nothing yet."""
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPSMITH_PYTHON_CALLS", raising=False)
    cache_on_disk.cache_clear()
    monkeypatch.setattr(extension, "calls_extension", extension.calls_extension.__wrapped__)
    monkeypatch.setattr(extension, "_packages", extension._packages[:1])  # other tests have built packages
    yield tmp_path / "cache"
    monkeypatch.undo()
    cache_on_disk.cache_clear()


def source(text: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Take this text for the source of the extension."""
    (folder / "module.cpp").write_text(text)
    monkeypatch.setattr(extension, "SOURCES", folder)
    monkeypatch.setattr(extension, "SOURCE", folder / "module.cpp")


def test_its_target_names_python_and_torch() -> None:
    assert extension.target().startswith(f"torch-{torch.__version__.partition('+')[0]}-cpython-3")


def test_without_a_build_there_is_none(own_cache: Path) -> None:
    assert extension.calls_extension() is None
    assert not own_cache.exists(), "a search makes nothing"


def test_it_can_be_left_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSMITH_PYTHON_CALLS", "1")
    assert extension.calls_extension.__wrapped__() is None
    monkeypatch.setenv("OPSMITH_PYTHON_CALLS", "yes")
    with pytest.raises(errors.UsageError, match="OPSMITH_PYTHON_CALLS has an invalid value"):
        extension.calls_extension.__wrapped__()


def test_without_a_compiler(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(errors.ToolchainError, match=r"there is no C\+\+ compiler"):
        extension.compile_calls()


def test_without_headers_of_python(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extension.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(errors.ToolchainError) as caught:
        extension.compile_calls()
    assert caught.value.message().splitlines() == [
        "calls in C++ cannot be compiled without Python's headers",
        f"  expected: the file {tmp_path / 'Python.h'}",
        "  got: no such file",
        "  hint: install Python's headers; on Debian or Ubuntu: `apt-get install python3-dev`",
    ]


def test_a_source_that_does_not_compile(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source("int broken(", monkeypatch, tmp_path)
    with pytest.raises(errors.ToolchainError) as caught:
        extension.compile_calls()
    text = str(caught.value)
    assert "the C++ compiler does not compile calls in C++" in text
    assert "expected: a C++20 compiler" in text
    assert "broken" in text
    assert "without them, Python does the same work" in text


def test_a_library_that_is_no_module_is_told_and_not_used(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source("int other() { return 1; }", monkeypatch, tmp_path)
    entry = extension.compile_calls()
    assert entry.source == "built"
    assert extension.compile_calls().source == "memory"
    with pytest.warns(RuntimeWarning, match=r"opsmith_calls\.so is not used: .*PyInit_opsmith_calls"):
        assert extension.calls_extension() is None
    library = entry.directory / extension.LIBRARY
    library.unlink()  # this process has it in its memory
    library.write_bytes(b"")
    assert extension.calls_extension() is None, "what is damaged is not loaded"


def test_that_of_opsmith_s_own_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make setup` has compiled it; else this takes a minute."""
    monkeypatch.setattr(extension, "_packages", extension._packages[:1])  # other tests have built packages
    built = write_named_by_content(build_calls(), tmp_path)
    assert (built.operator, built.language, built.target) == ("", extension.LANGUAGE, extension.target())
    write_manifest(tmp_path, [built], opsmith.__version__)
    package = package_of(opsmith.__file__)
    assert package is not None
    with looking_in(package, tmp_path, [built.target]):
        first, *others = extension._files()
    assert first == tmp_path / built.file
    assert [path.name for path in others] == [extension.LIBRARY]
    write_manifest(tmp_path, [replace(built, target="torch-1.0.0-cpython-30")], opsmith.__version__)
    with looking_in(package, tmp_path, ["torch-1.0.0-cpython-30"]):
        assert extension._files() == others, "one for another torch is not taken"


def test_a_cache_whose_name_is_too_long_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one in a folder that nobody may look into: the calls are made in Python."""
    place = f"/tmp/{'x' * 300}/cache"
    assert Cache(Path(place)).find({"kind": "calls"}) is None
    monkeypatch.setenv("OPSMITH_CACHE", place)
    assert extension.earlier_failure() == ""


def test_a_cache_that_others_write_into_is_not_searched(own_cache: Path) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    assert extension.calls_extension() is None, "a call goes on in Python"
    with pytest.raises(errors.CacheError, match="a directory that this user owns"):
        extension.compile_calls()
