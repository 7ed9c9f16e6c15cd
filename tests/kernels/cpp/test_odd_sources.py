"""C++ kernels whose text, file or name is unusual: each runs, or is refused in words."""

from __future__ import annotations

import importlib
import os
import py_compile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors

X = torch.arange(3.0)


def times(factor: str) -> str:
    return (
        "void twice(Contiguous<const float> x, Contiguous<float> y) {\n"
        f"  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] * {factor};\n}}\n"
    )


def declared(name: str, **kernel: Any) -> Any:
    @opsmith.operator(f"odd_sources::{name}")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    return twice.kernel("cpu", entry="twice", **kernel)


@pytest.mark.slow
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "kernel.cpp"
    file.write_text(times("5"), encoding="utf-8-sig")
    torch.testing.assert_close(declared("marked", cpp_file=file)(X), X * 5)


@pytest.mark.slow
def test_a_relative_file_is_found_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel.cpp").write_text(times("6"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    code = compile("operator.kernel('cpu', entry='twice', cpp_file='kernel.cpp')", "<cell>", "exec")
    operator = declared("relative", cpp=times("2"))
    exec(code, {"operator": operator})
    monkeypatch.chdir(tmp_path / "other")
    torch.testing.assert_close(operator(X), X * 6)
    (tmp_path / "kernel.cpp").write_text(times("7"))
    torch.testing.assert_close(operator.reload()(X), X * 7)


DECLARING = """
def declare(operator):
    return operator.kernel("cpu", entry="twice", cpp_file="kernel.cpp")
"""


def test_a_package_in_an_archive_takes_no_file_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as held:
        held.writestr("archived_kernel.py", DECLARING)
        held.writestr("kernel.cpp", times("2"))
    (tmp_path / "kernel.cpp").write_text(times("42"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(archive)
    operator = declared("archived", cpp=times("2"))
    with pytest.raises(errors.KernelSourceError, match="a kernel's file is in an archive") as caught:
        importlib.import_module("archived_kernel").declare(operator)
    assert (caught.value.got, caught.value.hint) == (
        f"kernel.cpp, in {archive}",
        "unpack the archive, or install it with pip",
    )


def test_a_file_is_beside_a_module_that_ships_without_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "site"
    place.mkdir()
    (place / "kernel.cpp").write_text(times("2"))
    (tmp_path / "bytecode_kernel.py").write_text(DECLARING)
    py_compile.compile(str(tmp_path / "bytecode_kernel.py"), str(place / "bytecode_kernel.pyc"), doraise=True)
    (tmp_path / "bytecode_kernel.py").unlink()
    (tmp_path / "kernel.cpp").write_text(times("42"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(place)
    operator = importlib.import_module("bytecode_kernel").declare(declared("bytecode", cpp=times("2")))
    (kernel,) = operator.specification.kernels
    assert kernel.given.source.path == str(place / "kernel.cpp")


def test_a_text_that_no_encoding_has_is_refused() -> None:
    with pytest.raises(
        errors.KernelSourceError, match="the text of a C\\+\\+ kernel is not valid Unicode"
    ) as caught:
        declared("surrogate", cpp=f"// \ud800\n{times('2')}")
    assert (caught.value.argument, caught.value.got) == ("cpp", r"'\ud800' at 3")
    assert caught.value.hint == "read the text with its encoding"


@pytest.mark.slow
def test_a_form_feed_ends_no_line(tmp_path: Path) -> None:
    file = tmp_path / "kernel.cpp"
    file.write_text("// a page\f and another\n" + times("oh"))
    with pytest.raises(errors.CompileError) as caught:
        declared("form_feed", cpp_file=file)(X)
    assert f"{file}:3:" in str(caught.value)
    assert "y[i] = x[i] * oh;" in str(caught.value)


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("name", ["two\nlines.cpp", 'quo"te.cpp', os.fsdecode(b"no\xffutf.cpp")])
def test_a_file_of_any_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    (tmp_path / "part.h").write_text("constexpr int part = 4;\n")
    file.write_text('#include "part.h"\n' + times("part"))
    number = sum(name.encode(errors="replace"))
    torch.testing.assert_close(declared(f"named_{number}", cpp_file=file)(X), X * 4)
    file.write_text('#include "part.h"\n' + times("oh"))
    with pytest.raises(errors.CompileError, match="'oh' was not declared"):
        declared(f"wrong_{number}", cpp_file=file)(X)


@pytest.mark.slow
def test_a_name_of_a_file_that_no_system_has_is_refused() -> None:
    with pytest.raises(errors.KernelSourceError, match="cannot be read"):
        declared("zero_byte", cpp_file="kernel\0.cpp")
    torch.testing.assert_close(declared("zero_in_text", cpp=f'// #include "a\0b"\n{times("2")}')(X), X * 2)


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_without_words_comes_back_from_the_reference() -> None:
    @opsmith.operator("odd_sources::mute")
    def mute(x: Tensor) -> Tensor:
        if x.dtype is torch.float64 and type(x) is Tensor:
            raise MuteError
        return x * 2

    mute.kernel("cpu", entry="twice", cpp=times("2"))
    torch.testing.assert_close(mute(X), X * 2)
    for _ in range(2):
        with pytest.raises(MuteError):
            mute(X.double())


COMPILING = """#!/bin/sh
case " $* " in *" -E "*|*trial.cpp*) exec g++ "$@";; esac
for each; do [ "$last" = -o ] && out=$each; last=$each; done
"""


def compiler(folder: Path, script: str) -> str:
    program = folder / "compiler"
    program.write_text(COMPILING + script)
    program.chmod(0o755)
    return str(program)


def test_a_library_without_the_kernel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'echo "int other;" | g++ -x c++ -shared -fPIC - -o "$out"'))
    with pytest.raises(errors.CompileError, match="the compiled kernel cannot be loaded") as caught:
        declared("without_kernel", cpp=times("11"))(X)
    assert "undefined symbol: opsmith" in (caught.value.got or "")


@pytest.mark.slow
def test_what_a_compiler_leaves_beside_the_library_is_no_part_of_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'g++ "$@" && mkdir -p below && ln -sf /etc/passwd link'))
    operator = declared("beside", cpp=times("12"))
    torch.testing.assert_close(operator(X), X * 12)
    assert operator.explain(X).forward.startswith("kernel for cpu")


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("line", ["", "kernel.cpp:1:1: error: "])
def test_a_line_without_end_is_cut(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"printf '{line}'; head -c 60000000 /dev/zero | tr '\\0' x; exit 1"
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(errors.CompileError, match="the C\\+\\+ compiler refuses the kernel") as caught:
        declared(f"endless_{bool(line)}", cpp=times("13"))(X)
    assert "xxx ..." in (caught.value.got or "")
    assert len(str(caught.value)) < 2000
