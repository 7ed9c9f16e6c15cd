"""Limits of a package: headers and folders that its built kernels may depend on."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from packaged_kernels import RUNNABLE

import opsmith
from opsmith import errors
from opsmith.build.compiler_options import compiler_options
from opsmith.build.elf import NEEDED, RPATH, RUNPATH, dynamic_texts
from opsmith.build.toolchain import find_toolchain
from opsmith.cli.verification import Verification, verified
from opsmith.kernels.common.ahead import shipped_headers
from opsmith.kernels.cpp.ahead import refuse_folders
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cuda.ahead import shipped_cuda_headers
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.shipping import BuildTargets, SourcePackage, staged_build
from opsmith.shipping.package_build import remove_abandoned

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no level of this machine's processors is known")

DECLARATION = """
import opsmith
from torch import Tensor

@opsmith.operator("limited_package::value", shapes="x: N -> N")
def value(x: Tensor) -> Tensor:
    return x + 2

value.kernel(
    "cpu",
    cpp_file="value.cpp",
    flags=["-DNAME=one.h"],
    include_dirs=["parts"],
    libraries=["parts/libpart.so", "m"],
)
"""
KERNEL = """
#define QUOTED(name) #name
#define STRING(name) QUOTED(name)
#include STRING(NAME)
extern "C" float part();
void value(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] + one + part();
}
"""
X = torch.zeros(1)


def link(folder: Path, *arguments: str, name: str, returns: int = 1) -> Path:
    (folder / "part.cpp").write_text(f'extern "C" float part() {{ return {returns}; }}\n')
    flags = ["-shared", "-fPIC", "-Wl,--no-as-needed", "part.cpp", *arguments, "-o", name]
    done = find_toolchain().run(flags, folder)
    assert done.status == 0, done.printed
    return folder / name


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a header that no directive names, and a library without a soname."""
    root = tmp_path_factory.mktemp("limits") / "limited_package"
    (root / "parts").mkdir(parents=True)
    (root / "__init__.py").write_text(DECLARATION)
    (root / "value.cpp").write_text(KERNEL)
    (root / "parts" / "one.h").write_text("const float one = 1;\n")
    link(root / "parts", name="libpart.so")
    with staged_build(SourcePackage.of(str(root)), BuildTargets.of(RUNNABLE[0], "none")) as made:
        made.write()
        file = made.files[-1]  # after those of opsmith itself
    assert file.headers.keys() == {"parts/one.h"}
    assert file.linked.keys() == {"parts/libpart.so"}
    assert file.libraries == ("m",)  # the other one ships
    return root


def built_library(package: Path) -> Path:
    (found,) = (package / "_kernels").glob("limited_package.*.so")
    return found


@pytest.mark.slow
def test_a_shipped_library_finds_those_of_its_package_wherever_that_lies(
    package: Path, tmp_path: Path
) -> None:
    content = built_library(package).read_bytes()
    assert dynamic_texts(content, RPATH, RUNPATH) == ["$ORIGIN/../parts"]
    assert "libpart.so" in dynamic_texts(content, NEEDED)
    assert str(package.parent).encode() not in content
    moved = shutil.copytree(package, tmp_path / "elsewhere")
    (package / "parts" / "libpart.so").rename(package / "away.so")
    ctypes.CDLL(str(built_library(moved)))
    (package / "away.so").rename(package / "parts" / "libpart.so")


def test_what_a_killed_build_left_goes_with_the_next_one(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, others = f"._kernels-{ended.pid}-abc", {f"._kernels-{os.getpid()}-abc", "._kernels-abc", "_kernels"}
    for name in (left, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "built.so").touch()
    remove_abandoned(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == others


@pytest.mark.slow
def test_a_wheel_s_kernels_are_verified_as_they_will_lie(package: Path, tmp_path: Path) -> None:
    found = SourcePackage.of(str(package))
    with staged_build(found, BuildTargets.of(RUNNABLE[0], "none"), tmp_path / "_kernels") as made:
        result = verified(made, lambda activity, done, total: None)
    assert result == Verification(verified=[f"limited_package::value for {RUNNABLE[0]}"])


def test_a_header_that_no_directive_names_decides_whether_a_built_kernel_is_used(package: Path) -> None:
    operator: Any = opsmith.find_operator("limited_package::value")
    header = package / "parts" / "one.h"
    assert operator.reload()(X).item() == 2
    assert operator.explain(X).origin == f"built into the package for {RUNNABLE[0]}"
    header.write_text("const float one = 100;\n")
    assert operator.reload()(X).item() == 101
    assert operator.explain(X).origin in ("compiled now", "from the cache")
    (kernel,) = [each.given for each in operator.specification.kernels]
    reason = kernel.built_in_package().reason
    assert (
        reason
        == f"the header parts/one.h has changed since the build, for the kernels in {package / '_kernels'}"
    )
    header.write_text("const float one = 1;\n")
    operator.reload()


@pytest.mark.parametrize(("kind", "name"), [("header", "one.h"), ("library", "libpart.so")])
def test_a_part_that_was_edited_or_lost_is_named(kind: str, name: str, package: Path) -> None:
    (kernel,) = opsmith.find_operator("limited_package::value").specification.kernels
    part, away = package / "parts" / name, package / "away"
    part.rename(away)
    try:
        reasons = [kernel.given.built_in_package().reason]
        part.write_text("another\n")
        reasons.append(kernel.given.built_in_package().reason)
    finally:
        away.replace(part)
    faults = ("is missing", "has changed since the build")
    assert reasons == [
        f"the {kind} parts/{name} {fault}, for the kernels in {package / '_kernels'}" for fault in faults
    ]


def test_a_library_of_the_same_name_that_is_loaded_is_not_taken(package: Path, tmp_path: Path) -> None:
    """The loader takes it for a built kernel, which names no folder."""
    operator: Any = opsmith.find_operator("limited_package::value")
    other = link(tmp_path, name="libpart.so", returns=5)
    loaded = ctypes.CDLL(str(other))
    try:
        assert operator.reload()(X).item() == 2
        found = operator.explain(X)
        assert found.origin in ("compiled now", "from the cache")
    finally:
        _ctypes.dlclose(loaded._handle)
    assert operator.reload()(X).item() == 2
    assert operator.explain(X).origin == f"built into the package for {RUNNABLE[0]}"


@pytest.fixture
def kernel() -> CppKernel:
    @opsmith.operator("limits::value")
    def value(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    value.kernel("cpu", cpp="void value(View<const float, 1> x, View<float, 1> y) {}")
    found = value.specification.kernels[0].given
    assert isinstance(found, CppKernel)
    return found


def test_headers_lie_in_the_package_or_are_installed(kernel: CppKernel, tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(package)
    installed = f"{sysconfig.get_path('purelib')}/other/include/other.h"
    given = {
        f"{package}/b.h": "1",
        f"{tmp_path}/link/inner/../a.h": "2",
        installed: "3",
        f"{sys.prefix}/include/library.h": "4",
    }
    assert shipped_headers(kernel, package, given) == {"a.h": "2", "b.h": "1"}
    with pytest.raises(errors.UsageError) as caught:
        shipped_headers(kernel, package, {f"{package}/../include/c.h": "5"})
    assert caught.value.message().splitlines() == [
        "limits::value: a header of its kernel in C++ lies outside of the package",
        "  argument: include_dirs",
        f"  expected: headers in {package}, or installed headers",
        f"  got: {tmp_path}/include/c.h",
        f"  where: {kernel.where}",
        "  hint: copy the header into the package, because users need it and opsmith must notice its edits",
    ]


@pytest.mark.slow
def test_a_header_outside_of_the_package_is_found_by_the_preprocessor(tmp_path: Path) -> None:
    """The system's are not among those that a kernel is asked about."""
    (tmp_path / "own.h").write_text("#include <vector>\n#include <omp.h>\n")

    @opsmith.operator("limits::outside")
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    outside.kernel(
        "cpu",
        cpp="#include <own.h>\nvoid outside(View<const float, 1> x, View<float, 1> y) { y(0) = x(0) + 1; }",
        include_dirs=[tmp_path, "/usr/include"],
    )
    found = outside.specification.kernels[0].given
    assert isinstance(found, CppKernel)
    assert [*found.compile_with_headers()[1]] == [str(tmp_path / "own.h")]


def cuda_kernel(text: str) -> CudaKernel:
    @opsmith.operator("limits::on_gpu")
    def on_gpu(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    kernel = "__global__ void on_gpu(View<const float, 1> x, View<float, 1> y) {}"
    on_gpu.kernel("cuda", cuda=f"{text}\n{kernel}", grid=1)
    found = on_gpu.specification.kernels[0].given
    assert isinstance(found, CudaKernel)
    return found


def test_headers_of_cuda_kernels_are_named(tmp_path: Path) -> None:
    here = Path(__file__).parent
    named = '#define NAME "scaled_package/product.h"\n#if 1\n# include NAME // a comment\n#endif'
    assert [*shipped_cuda_headers(cuda_kernel(named), here)] == ["scaled_package/product.h"]
    with pytest.raises(errors.UsageError, match="lies outside of the package"):
        shipped_cuda_headers(cuda_kernel(named), here / "wrong_package")
    computed = "#define STRING(name) #name\n#include STRING(product.h)"
    with pytest.raises(errors.UsageError) as caught:
        shipped_cuda_headers(cuda_kernel(computed), here)
    assert re.sub(r"where: .*", "where: ...", caught.value.message()).splitlines() == [
        "limits::on_gpu: a macro computes the name of a header that its CUDA kernel includes",
        "  expected: the name of each header in an `#include`, or in the definition of a macro",
        "  got: #include STRING(product.h)",
        "  where: ...",
        '  hint: write each name out: one `#include "..."` for each case',
    ]


@pytest.mark.slow
def test_a_library_that_names_a_folder_of_this_machine(kernel: CppKernel, tmp_path: Path) -> None:
    other = link(tmp_path, name="libother.so")
    fine = link(tmp_path, f"-L{tmp_path}", "-l:libother.so", "-Wl,-rpath,$ORIGIN/../a:$ORIGIN", name="a.so")
    refuse_folders(kernel, fine.read_bytes())
    wrong = link(tmp_path, str(other), "-Wl,-rpath,$ORIGIN/../a:/opt/lib", name="b.so")
    with pytest.raises(errors.UsageError) as caught:
        refuse_folders(kernel, wrong.read_bytes())
    assert caught.value.message().splitlines() == [
        "limits::value: its built kernel in C++ names a folder of this machine, from which a process would "
        "load code",
        "  argument: flags",
        "  expected: libraries in the package, or libraries that a process finds without a path",
        f"  got: '/opt/lib', '{other}'",
        f"  where: {kernel.where}",
        "  hint: leave `-rpath` out of `flags=`, and unset LD_RUN_PATH",
    ]


def test_what_ships_names_libraries_by_their_files(tmp_path: Path) -> None:
    home = tmp_path / "package" / "_kernels"
    for path in ("package/lib/libin.so.1", "out/libout.so", "out/libstatic.a"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    options = compiler_options(
        [f"-L{tmp_path}/out"],
        None,
        [
            tmp_path / "package/lib/libin.so.1",
            tmp_path / "out/libout.so",
            tmp_path / "out/libstatic.a",
            "out",
        ],
        declared=None,
    )
    linking = " ".join(options.linking(find_toolchain(), home))
    assert re.findall(r"-rpath -Xlinker (\S+)", linking) == ["$ORIGIN/../lib"]
    assert f"-L{tmp_path}/package/lib -l:libin.so.1" in linking
    assert linking.count(".so") == 2, "by their file names alone"
    assert options.foreign(find_toolchain(), home) == ("libout.so", "out")
