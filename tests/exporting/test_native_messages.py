"""Messages about kernels that cannot be packaged, loaded or run from a library; no file is left."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import native_operators as of
import onnx_operators
import pytest
import torch

import opsmith
import opsmith.onnx
from opsmith import errors
from opsmith.build import toolchain
from opsmith.exporting.library import refuse_unused
from opsmith.kernels.cpp import kernel_object as packaging
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.runtime import linked_library
from opsmith.kernels.runtime import onnx as onnx_library

X = torch.arange(4.0)
Fails = Callable[..., str]


def place(operator: Any) -> str:
    """`file:line` of an operator."""
    return f"{inspect.getsourcefile(operator.reference)}:{inspect.getsourcelines(operator.reference)[1]}"


@pytest.fixture
def fails(tmp_path: Path) -> Fails:
    """The message of an export that fails; nothing is left of it."""

    def fails(error: type[errors.OpsmithError], model: Any, args: Any = X, **options: Any) -> str:
        options.setdefault("library", tmp_path / "ops.so")
        with pytest.raises(error) as caught:
            opsmith.export_onnx(model, args, tmp_path / "model.onnx", **options)
        assert type(caught.value) is error
        assert not list(tmp_path.iterdir())
        return caught.value.message()

    return fails


def test_an_inlined_file_has_no_nodes_for_it(fails: Fails) -> None:
    assert fails(errors.UsageError, of.single, body="inline") == (
        "an inlined file has no nodes that a library could compute\n"
        "  argument: library\n"
        "  expected: `body='function'` or `body='node'`\n"
        "  got: `body='inline'`\n"
        "  hint: leave `body=` out, or leave `library=` out"
    )


@pytest.mark.parametrize(
    ("library", "shown", "got", "hint"),
    [
        (".", "{folder}", "a folder", "name a file in this folder, `ops.so`"),
        (
            "missing/ops.so",
            "{folder}/missing/ops.so",
            "there is no folder `{folder}/missing`",
            "make the folder first",
        ),
        (
            "model.onnx",
            "{folder}/model.onnx",
            "the exported model is written to this file",
            "name another file",
        ),
        (3, "3", "int", "give the name of a file, `ops.so`"),
    ],
    ids=["folder", "missing", "same", "number"],
)
def test_places_that_cannot_be_written(
    fails: Fails, tmp_path: Path, library: Any, shown: str, got: str, hint: str
) -> None:
    given = tmp_path / library if isinstance(library, str) else library
    assert fails(errors.UsageError, of.single, library=given) == (
        f"no file can be written to `{shown.format(folder=tmp_path)}`\n"
        "  argument: library\n"
        "  expected: a file in an existing folder that can be written to\n"
        f"  got: {got.format(folder=tmp_path)}\n"
        f"  hint: {hint}"
    )


@pytest.mark.slow
def test_no_operator_with_a_kernel_in_cpp(fails: Fails) -> None:
    assert fails(errors.ExportError, onnx_operators.constant, torch.ones(3)) == (
        "no operator of the model can be packaged into a library\n"
        "  expected: an operator with a kernel in C++ that takes its calls\n"
        "  got: nodes::constant: it has no kernel in C++\n"
        "  hint: give an operator a kernel, `op.kernel('cpu', cpp=...)`, or leave `library=` out"
    )


@pytest.mark.slow
def test_no_operator_at_all(fails: Fails) -> None:
    assert "\n  got: no operators\n" in fails(errors.ExportError, torch.nn.ReLU().eval())


@pytest.mark.slow
def test_a_node_without_a_body_that_no_kernel_takes(fails: Fails) -> None:
    assert fails(errors.ExportError, of.single, X.double(), body="node") == (
        "native::single: it cannot be packaged into a library, and its node has no body\n"
        "  expected: a kernel in C++ that takes its calls\n"
        "  got: `x` is float64, but the kernel takes float32\n"
        f"  where: {place(of.single)}\n"
        "  hint: give the operator a kernel, `op.kernel('cpu', cpp=...)`, or write `body='function'` to "
        "compute its body"
    )


@pytest.mark.slow
def test_nodes_that_a_symbolic_names(fails: Fails) -> None:
    class Named(torch.autograd.Function):
        @staticmethod
        def symbolic(g: Any, x: Any) -> Any:
            return g.op("native::Named", x)

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    named = opsmith.adopt(Named, "native::named")
    named.kernel(
        "cpu", cpp="void named(Contiguous<const float, 1> x, Contiguous<float, 1> y) {}", strict=True
    )
    reason = "`symbolic` names its node, and may write the attributes in any form"
    message = fails(errors.ExportError, named, torch.zeros(0), verify=False)
    assert f"\n  got: native::named: {reason}\n" in message


@pytest.mark.slow
def test_no_compiler(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    toolchain._toolchain.cache_clear()
    message = fails(errors.ToolchainError, onnx_operators.constant, torch.ones(3))
    toolchain._toolchain.cache_clear()
    assert message.startswith("there is no C++ compiler\n")
    assert "\n  expected: the program that CXX names, `no-such-compiler`\n" in message


def packaged_anew(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have nothing of a library in the cache."""
    monkeypatch.setenv("OPSMITH_CACHE", str(folder))
    cache = linked_library.cache_on_disk.__wrapped__()
    monkeypatch.setattr(linked_library, "cache_on_disk", lambda: cache)


@pytest.mark.slow
def test_no_objcopy(
    fails: Fails, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packaged_anew(monkeypatch, tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(packaging, "_objcopy", lambda: None)
    assert fails(errors.ToolchainError, of.single, verify=False) == (
        "linking a kernel needs `objcopy`, which comes with GNU's linker\n"
        "  expected: `objcopy` in PATH\n"
        "  got: no program with this name\n"
        "  hint: install GNU binutils; on Debian or Ubuntu with `apt-get install binutils`"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "limit", "got"),
    [
        ("echo 'objcopy: no such option' >&2; exit 1", packaging.LIMIT_S, "objcopy: no such option"),
        ("exec sleep 60", 1, "`objcopy` did not end within 1 s"),
    ],
    ids=["refuses", "hangs"],
)
def test_an_objcopy_that_fails(
    fails: Fails,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    does: str,
    limit: int,
    got: str,
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    packaged_anew(monkeypatch, folder)
    program = folder / "objcopy"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    monkeypatch.setattr(packaging, "_objcopy", lambda: str(program))
    monkeypatch.setattr(packaging, "LIMIT_S", limit)
    assert fails(errors.ToolchainError, of.single, verify=False) == (
        "`objcopy` failed to make a kernel's symbols local\n"
        "  expected: GNU binutils 2.29 or later\n"
        f"  got: {got}\n"
        "  hint: install GNU binutils; on Debian or Ubuntu with `apt-get install binutils`"
    )


@pytest.mark.slow
def test_a_linker_that_fails(
    fails: Fails, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packaged_anew(monkeypatch, tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(linked_library, "ANY_PROCESSOR", ("-std=c++no",))
    message = fails(errors.ToolchainError, of.single, verify=False)
    assert message.startswith(
        "the C++ compiler does not compile a library for ONNX Runtime\n"
        "  expected: a compiler of C++17 with GNU's linker, such as g++ 9 with binutils 2.29\n"
    )
    assert "-std=c++no" in message


def test_a_compiler_that_writes_nothing(
    fails: Fails, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    packaged_anew(monkeypatch, folder)
    monkeypatch.setattr(toolchain.Toolchain, "run", lambda *given: toolchain.CompilerOutput(0, ""))
    with pytest.raises(errors.ToolchainError, match="wrote no complete file"):
        onnx_library.link_library(())
    assert not list(folder.rglob("manifest.json"))


@pytest.mark.slow
def test_a_source_that_the_compiler_refuses(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kernel: CppKernel, processor: str) -> Any:
        source = replace(kernel.source, text=kernel.source.text.replace("+ 1;", "+ one;"))
        return packaging.kernel_object(source, kernel.operator.name, (), processor)

    monkeypatch.setattr(CppKernel, "library_object", broken)
    message = fails(errors.CompileError, of.single, verify=False)
    assert message.startswith("native::single: the C++ compiler refuses the kernel\n")
    assert "'one' was not declared" in message


@pytest.mark.slow
def test_a_library_that_computes_something_else(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(kernel: CppKernel, processor: str) -> Any:
        source = replace(kernel.source, text=kernel.source.text.replace("+ 1;", "+ 3;"))
        return packaging.kernel_object(source, kernel.operator.name, (), processor)

    monkeypatch.setattr(CppKernel, "library_object", other)
    assert fails(errors.ExportMismatchError, of.single, dynamic={"x": {0: "n"}}) == (
        "native::single: the file and PyTorch compute different values of `result` at n 4, with the library "
        "of "
        "kernels\n"
        "  argument: result\n"
        "  expected: at most 6.5e-07: (8 + 2 √2) roundings of the largest value in float32, for 2 nodes "
        "that round\n"
        "  got: off by 5.0e-01 of the largest value; the first node that differs is `single`, whose output "
        "`single` is off by 5.0e-01\n"
        "  hint: no file was left; compare the operator's kernel with its reference: `opsmith check`"
    )


def test_nodes_that_are_not_computed_by_the_library() -> None:
    with pytest.raises(errors.OnnxRuntimeError) as caught:
        refuse_unused({"native::single": 3, "native::halved": 1}, {"native::single": 2}, "model.onnx")
    assert caught.value.message() == (
        "native::single: ONNX Runtime computes nodes of `model.onnx` by their bodies, though the library "
        "has a kernel\n"
        "  expected: 3 nodes of the operator in the optimised graph\n"
        "  got: 2\n"
        "  hint: leave `library=` out, and report this fault to opsmith with the model"
    )


@pytest.mark.slow
def test_a_kernel_that_is_wrong_in_pytorch_too(fails: Fails) -> None:
    message = fails(errors.ExportMismatchError, of.rough, body="node")
    assert message.startswith("native::rough: the file and PyTorch compute different values of `result`\n")


@pytest.mark.slow
def test_a_library_for_another_processor(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    generated = onnx_library.node_tables
    xop = "1u << 16"  # which processors had from 2011 to 2017
    monkeypatch.setattr(
        onnx_library, "node_tables", lambda *given: generated(*given).replace("used_instructions", xop)
    )
    assert fails(errors.OnnxRuntimeError, of.single) == (
        "ONNX Runtime does not load the library `ops.so`: opsmith: this library was compiled for a processor "
        "with xop, which this processor lacks; package the library on a machine of this kind\n"
        "  expected: a library that `export_onnx(..., library=...)` wrote, on a machine of this kind\n"
        "  got: ops.so\n"
        "  hint: export the model again on this machine; the library needs the OpenMP of g++ (libgomp)"
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> opsmith.exporting.Export:
    folder = tmp_path_factory.mktemp("native")
    return opsmith.export_onnx(of.single, X, folder / "model.onnx", library=folder / "ops.so")


@pytest.mark.slow
def test_a_library_that_is_none(exported: opsmith.exporting.Export, tmp_path: Path) -> None:
    library = tmp_path / "text.so"
    with pytest.raises(errors.UsageError, match="there is no file") as missing:
        opsmith.onnx.load(exported.path, library=library)
    assert missing.value.argument == "library"
    assert missing.value.hint == "export it first: `opsmith.export_onnx(model, args, path, library=library)`"
    library.write_text("no library")
    with pytest.raises(errors.OnnxRuntimeError) as caught:
        opsmith.onnx.load(exported.path, library=library)
    assert str(caught.value).startswith(f"ONNX Runtime does not load the library `{library.name}`: ")
    assert caught.value.got == library.name


@pytest.mark.slow
def test_a_runtime_that_is_too_old(exported: opsmith.exporting.Export) -> None:
    said: list[tuple[int, bytes]] = []
    status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(
        lambda code, text: said.append((code, text)) or 7
    )
    table = (ctypes.c_void_p * 1)(ctypes.cast(status, ctypes.c_void_p))
    version, asked = ctypes.create_string_buffer(b"1.15.0"), []

    def get_api(number: int) -> int:
        asked.append(number)
        return ctypes.addressof(table) if number < 16 else 0

    functions = [
        ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(get_api),
        ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(version)),
    ]
    base = (ctypes.c_void_p * 2)(*(ctypes.cast(each, ctypes.c_void_p) for each in functions))
    library = ctypes.CDLL(str(exported.library))
    library.RegisterCustomOps.restype = ctypes.c_void_p
    assert library.RegisterCustomOps(None, base) == 7
    assert asked == [16, 1]
    assert said == [(1, b"opsmith: this library needs ONNX Runtime 1.16 or later, but this is 1.15.0")]
