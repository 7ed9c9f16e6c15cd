"""Flags, folders of headers and libraries of a C++ kernel: what they do, where they act, what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.build.compiler_options import AS_BEFORE, KEEPING, CompilerOptions, compiler_options
from opsmith.build.toolchain import Toolchain, find_toolchain
from opsmith.kernels.cpp.codegen import implied_headers
from opsmith.kernels.cpp.compiler import compile_kernel, kernel_flags
from opsmith.kernels.cpp.sanitizer import sanitized, unset_lines
from opsmith.kernels.cpp.source import CppSource, cpp_source
from opsmith.kernels.runtime.loading import LIBRARY

TEXT = "{above}\nvoid value(View<const float, 1> x, View<float, 1> y) {{ y(0) = {value}; }}\n"


def declared() -> Any:
    @opsmith.operator("options::value")
    def value(x: Tensor) -> Tensor:
        return x + 1

    return value


def kernel(value: str, above: str = "", **options: Any) -> Any:
    return declared().kernel("cpu", cpp=TEXT.format(value=value, above=above), **options)


def source_of(value: str, above: str = "", **options: Any) -> CppSource:
    given = compiler_options(**options, declared=__file__)
    text = TEXT.format(value=value, above=above)
    return cpp_source("options::value", cpp=text, cpp_file=None, entry=None, declared=None, options=given)


def run(*command: str, at: Path) -> str:
    program = find_toolchain().command[0]
    done = subprocess.run([program, *command], cwd=at, capture_output=True, text=True, check=True)
    return done.stdout


def library(folder: Path, number: int, soname: str | None = None) -> Path:
    """Build `libnumber.so` in a folder, with a function that returns a number."""
    folder.mkdir(exist_ok=True)
    (folder / "number.cpp").write_text(f'extern "C" float number() {{ return {number}; }}\n')
    named = [f"-Wl,-soname,{soname}"] if soname else []
    run("-shared", "-fPIC", *named, "number.cpp", "-o", soname or "libnumber.so", at=folder)
    if soname:
        (folder / "libnumber.so").symlink_to(soname)
    return folder / "libnumber.so"


NUMBER = 'extern "C" float number();'


def fast_math() -> list[str]:
    """Flags by which every g++ flushes denormal numbers if its linker sees them; from 13 on by the second."""
    tried = subprocess.run(
        [find_toolchain().command[0], "-mdaz-ftz", "-fsyntax-only", "-x", "c++", "/dev/null"],
        capture_output=True,
        check=False,
    )
    return ["-ffast-math", *([] if tried.returncode else ["-mdaz-ftz"])]


FLUSHES = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
print(5e-324 * float(sys.argv[2]))
"""


def test_fast_math_leaves_the_denormal_numbers_of_the_process(tmp_path: Path) -> None:
    flags = fast_math()
    fast = kernel("number", "#ifdef __FAST_MATH__\nconst float number = 7;\n#endif", flags=flags)
    assert fast(torch.zeros(1)).item() == 7
    assert repr(float("5e-324") * float("1")) == "5e-324"  # flushed, it would still equal another such number
    tiny = torch.full((1000,), 1e-310, dtype=torch.float64)
    assert str((tiny * 0.5)[-1].item()) == "5e-311"
    (tmp_path / "empty.cpp").write_text("")  # the same flags in a link would show in this test
    run("-shared", "-fPIC", *flags, "empty.cpp", "-o", "fast.so", at=tmp_path)
    command = [sys.executable, "-c", FLUSHES, str(tmp_path / "fast.so"), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "0.0\n"


def test_no_linker_sees_a_flag_for_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    plain = Toolchain.run

    def record(self: Toolchain, arguments: list[str], directory: Path) -> Any:
        commands.append(arguments)
        return plain(self, arguments, directory)

    monkeypatch.setattr(Toolchain, "run", record)
    flags = ["-Ofast", "-funsafe-math-optimizations", "-Wl,-z,now", "--param", "max-unroll-times=4"]
    entry = compile_kernel(source_of("1", f"// {tmp_path}", flags=flags), "options::value", ())
    assert entry.source == "built"
    compiled, linked = commands[-2:]
    assert "-c" in compiled
    assert {"-Ofast", "--param", "max-unroll-times=4"} <= set(compiled)
    assert "-Wl,-z,now" not in compiled
    assert "-Wl,-z,now" in linked
    assert not {"-Ofast", "-funsafe-math-optimizations", "--param", "max-unroll-times=4"} & set(linked)
    assert sorted(path.name for path in entry.directory.iterdir()) == ["kernel.cpp", LIBRARY, "manifest.json"]


def test_flags_are_in_the_key_and_in_explain() -> None:
    for number in (1, 2, 1):
        defined = kernel("VALUE", flags=[f"-DVALUE={number}"])
        assert defined(torch.zeros(1)).item() == number
        said = defined.explain(torch.zeros(1)).forward
        assert said == f"kernel for cpu (-DVALUE={number}), {defined.specification.kernels[0].where}"


def test_headers_of_a_folder_are_in_the_key(tmp_path: Path) -> None:
    folder = tmp_path / "headers"
    folder.mkdir()
    header = folder / "number.h"
    header.write_text('#include "opsmith.h"\nconst float number = 1;\n')
    included = kernel("number", "#include <number.h>", include_dirs=[folder])
    assert included(torch.zeros(1)).item() == 1
    header.write_text("const float number = 2;\n")
    assert included(torch.zeros(1)).item() == 1
    assert included.reload()(torch.zeros(1)).item() == 2
    shutil.rmtree(folder)
    with pytest.raises(errors.CompileError) as caught:
        included.reload()(torch.zeros(1))
    assert caught.value.message().splitlines() == [
        "options::value: a folder of headers of the C++ kernel does not exist",
        "  argument: include_dirs",
        "  expected: an absolute path, or a path relative to the file that declares the kernel",
        f"  got: {folder}",
        f"  where: {included.specification.kernels[0].where}",
        "  hint: install the library with this file or folder, or correct the path",
    ]


def test_relative_paths_are_beside_the_declaring_file() -> None:
    here = Path(__file__).parent
    given = compiler_options(
        ["-Lparts", "-L", "more"],
        ["parts", Path("/usr/include")],
        ["parts/libone.so", "libtwo.a", "m"],
        declared=__file__,
    )
    assert given == CompilerOptions(
        (f"-L{here / 'parts'}", f"-L{here / 'more'}"),
        (str(here / "parts"), "/usr/include"),
        (str(here / "parts" / "libone.so"), str(here / "libtwo.a"), "m"),
    )


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("form", ["soname", "file", "folder"])
def test_a_library_is_linked_found_again_and_in_the_key(form: str, tmp_path: Path) -> None:
    folder = tmp_path / form
    file = library(folder, 3, "libnumber.so.3" if form == "soname" else None)
    options: Any = {"libraries": [file]}
    if form != "file":
        options = {"libraries": ["number"], "flags": [f"-L{folder}"]}
    linked = kernel("number()", NUMBER, **options)
    assert linked(torch.zeros(1)).item() == 3
    before = source_of("number()", NUMBER, **options).options.parts(find_toolchain())
    assert str(folder) in before["libraries"]
    file.resolve().touch()
    after = source_of("number()", NUMBER, **options).options.parts(find_toolchain())
    assert after["linking"] == before["linking"]
    assert after["libraries"] != before["libraries"]


@pytest.mark.slow
def test_a_library_of_the_system_is_found_by_its_name() -> None:
    linked = kernel("zlibVersion()[0] - '0'", 'extern "C" const char* zlibVersion();', libraries=["c"])
    with pytest.raises(errors.CompileError, match="`zlibVersion` is defined neither"):
        linked(torch.zeros(1))
    options = source_of("1", libraries=["m"]).options
    assert "libm." in options.parts(find_toolchain())["libraries"]
    assert options.linking(find_toolchain()) == [KEEPING, "-lm", AS_BEFORE]


def test_a_library_that_the_linker_does_not_find() -> None:
    missing = kernel("1", libraries=["nowhere"])
    with pytest.raises(errors.CompileError) as caught:
        missing(torch.zeros(1))
    lines = caught.value.message().splitlines()
    assert lines[:3] == [
        "options::value: the linker does not find a library of the C++ kernel",
        "  argument: libraries",
        "  expected: libnowhere.so or libnowhere.a in a folder that the linker searches",
    ]
    assert lines[3].startswith("  got: cannot find -lnowhere")
    assert lines[5] == (
        "  hint: install the library with its development files, or name its folder: "
        '`flags=["-L/its/folder"]`'
    )


@pytest.mark.slow
def test_a_library_that_is_not_found_when_the_kernel_is_loaded(tmp_path: Path) -> None:
    library(tmp_path / "parts", 3, "libnumber.so.7")
    (tmp_path / "parts" / "libnumber.so").unlink()
    (tmp_path / "parts" / "libnumber.so.7").rename(tmp_path / "parts" / "libnumber.so")
    linked = kernel("number()", NUMBER, libraries=[tmp_path / "parts" / "libnumber.so"])
    with pytest.raises(errors.CompileError) as caught:
        linked(torch.zeros(1))
    message = str(caught.value)
    assert "the compiled kernel cannot be loaded\n  got: libnumber.so.7: cannot open" in message
    assert "hint: give the path of `libnumber.so.7` in `libraries=`" in message


@pytest.mark.slow
def test_a_kernel_never_gets_another_library_of_the_same_name(tmp_path: Path) -> None:
    first, second = (library(tmp_path / str(number), number, "libsame.so.1") for number in (3, 5))
    kept = kernel("number()", NUMBER, libraries=[first])
    assert kept(torch.zeros(1)).item() == 3
    refused = kernel("number()", NUMBER, libraries=[second])
    with pytest.raises(errors.CompileError, match="has loaded a different library of this name") as caught:
        refused(torch.zeros(1))
    assert (caught.value.expected, caught.value.got) == (str(second), str(first.resolve()))


@pytest.mark.parametrize("argument", ["libraries", "flags"])
def test_a_file_or_a_folder_of_libraries_that_does_not_exist(argument: str, tmp_path: Path) -> None:
    given = tmp_path / "libgone.so"
    missing = kernel("1", **{argument: [given if argument == "libraries" else f"-L{given}"]})
    with pytest.raises(errors.CompileError, match=f"argument: {argument}\n(.*\n)* +got: {given}\n"):
        missing(torch.zeros(1))


def test_an_unknown_flag_is_an_error_of_the_compiler() -> None:
    unknown = kernel("1", flags=["-funknown-option"])
    with pytest.raises(errors.CompileError, match=r"refuses the kernel\n  got: .*-funknown-option"):
        unknown(torch.zeros(1))


REFUSED = {
    "-o": "opsmith decides what is compiled",
    "-okernel.so": "opsmith decides what is compiled",
    "-c": "opsmith decides what is compiled",
    "-E": "opsmith decides what is compiled",
    "-MMD": "opsmith decides what is compiled",
    "-shared": "linked as a shared library",
    "-static": "linked as a shared library",
    "-fno-pic": "the code of a library may be loaded at any address",
    "-fPIE": "the code of a library may be loaded at any address",
    "-std=c++14": "opsmith.h is C++17",
    "-std=gnu++0x": "opsmith.h is C++17",
    "-std=c11": "opsmith.h is C++17",
    "-ansi": "opsmith.h is C++17",
    "-m32": "in the compiler's default layout",
    "-fshort-enums": "in the compiler's default layout",
    "-fno-exceptions": "OPSMITH_CHECK throws",
    "-fsanitize=address": "a process loads sanitizers before everything else",
    "-flto": "a kernel is a single file",
    "-I/usr/include": "folders of headers have an argument",
    "-iquote": "folders of headers have an argument",
    "-isystem/usr/include": "folders of headers have an argument",
    "-idirafter": "folders of headers have an argument",
    "-isysroot": "folders of headers have an argument",
    "-include": "the text of a kernel names the headers",
    "--include=before.h": "the text of a kernel names the headers",
    "-imacros": "the text of a kernel names the headers",
    "-Wp,-DA,-include,before.h": "the text of a kernel names the headers",
    "-lopenblas": "libraries have an argument",
    "@flags.txt": "the key of a kernel does not contain the content",
    "-O2 -ffast-math": "it is more than one flag",
    "kernel.o": "a flag begins with `-`",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_that_changes_what_opsmith_needs(flag: str) -> None:
    with pytest.raises(
        errors.UsageError, match=r"options::value: a C\+\+ kernel cannot have the flag"
    ) as caught:
        kernel("1", flags=["-O2", flag])
    assert caught.value.argument == "flags"
    assert caught.value.hint
    assert REFUSED[flag] in caught.value.problem


@pytest.mark.parametrize("flag", ["-Xclang", "-Xpreprocessor"])
def test_a_flag_that_is_passed_on_is_refused_as_well(flag: str) -> None:
    with pytest.raises(errors.UsageError, match="cannot have the flag `-include`") as caught:
        compiler_options([flag, "-include"], declared=None)
    assert caught.value.hint == 'write `#include "..."` into the source'
    assert compiler_options([flag, "-DA"], declared=None).flags == (flag, "-DA")


@pytest.mark.parametrize(
    "flag",
    ["-std=c++17", "-std=gnu++20", "-std=c++2b", "-static-libgcc", "-O0", "-DSIZE=a -b", "-march=native"],
)
def test_a_flag_that_a_kernel_can_have(flag: str) -> None:
    assert compiler_options([flag], declared=None).flags == (flag,)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"flags": "-ffast-math"}, 'write `flags=["-ffast-math"]`'),
        ({"flags": [3]}, 'write `flags=["-ffast-math"]`'),
        ({"flags": [""]}, 'write `flags=["-ffast-math"]`'),
        ({"include_dirs": "/usr/include"}, 'write `include_dirs=["/usr/include"]`'),
        ({"include_dirs": Path("/usr/include")}, 'write `include_dirs=["/usr/include/eigen3"]`'),
        ({"libraries": {"openblas"}}, 'write `libraries=["openblas"]`'),
        ({"libraries": ["a\0b"]}, 'write `libraries=["openblas"]`'),
    ],
    ids=str,
)
def test_what_is_no_list(options: Any, hint: str) -> None:
    (argument,) = options
    with pytest.raises(
        errors.UsageError, match=rf"`{argument}=` of a C\+\+ kernel is not a list of"
    ) as caught:
        kernel("1", **options)
    assert (caught.value.argument, caught.value.hint) == (argument, hint)


def test_a_library_is_named_without_its_flag() -> None:
    with pytest.raises(errors.UsageError, match="must not begin with `-`") as caught:
        kernel("1", libraries=["-lopenblas"])
    assert caught.value.hint == "write `libraries=['openblas']`"


def test_other_languages_have_no_flags() -> None:
    with pytest.raises(errors.UsageError, match=r"a kernel in CUDA C\+\+ is given unknown options"):
        declared().kernel("cuda", cuda="__global__ void value() {}", grid=1, flags=["-O2"])


def test_a_sanitised_build_has_the_flags_and_keeps_its_own() -> None:
    source = source_of("VALUE", flags=["-DVALUE=1", "-O3"])
    with sanitized("pattern"):
        flags = kernel_flags(source)
    assert flags.index("-DVALUE=1") < flags.index("-O3") < flags.index("-Og")
    above = "static float unset(int64_t n) { float a[2]; return a[n]; }"
    assert unset_lines(
        source_of("unset(x.size(0) - VALUE)", above, flags=["-DVALUE=1"]), "options::value", ()
    )


@pytest.mark.slow
def test_a_sanitised_run_and_a_library_for_onnx_runtime_have_the_options(tmp_path: Path) -> None:
    import onnxruntime  # noqa: F401  # the export runs it

    import opsmith.onnx

    folder = tmp_path / "parts"
    library(folder, 2, "libnumber.so.2")
    (folder / "one.h").write_text('#include "opsmith.h"\nconst float one = 1;\n')

    @opsmith.operator("options::four", shapes="x: N -> N")
    def four(x: Tensor) -> Tensor:
        return x * 4

    four.kernel(
        "cpu",
        cpp=f"""
#include <one.h>
{NUMBER}
void four(Contiguous<const float, 1> x, Contiguous<float, 1> y) {{
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] * (one + number() + ANOTHER);
}}
""",
        flags=[f"-L{folder}", "-DANOTHER=1"],
        include_dirs=[folder],
        libraries=["number"],
    )
    x = torch.arange(3.0)
    report = opsmith.check(four, samples=[(x,)], only=["sanitized"], sanitize=True, effort="quick")
    assert [each.status for each in report.outcomes if each.property == "sanitized"] == ["passed"]
    made = opsmith.export_onnx(four, (x,), tmp_path / "four.onnx", library=tmp_path / "four.so")
    assert dict(made.native)
    assert opsmith.onnx.load(made.path, library=made.library)(x).tolist() == [0, 4, 8]


def test_every_function_of_cmath_is_known_to_need_it(tmp_path: Path) -> None:
    (tmp_path / "math.cpp").write_text("#include <cmath>\n")
    text = run("-std=c++17", "-E", "math.cpp", at=tmp_path)
    names = re.findall(r"using ::(\w+);", text)
    assert {"acosf", "cbrt", "tgamma"} & {*names}
    names += [
        "INFINITY",
        "NAN",
        "M_PI",
        "expf",
        "isnan",
        "isgreater",
        "cyl_bessel_jf",
        "sph_legendre",
        "beta",
    ]
    assert [name for name in names if implied_headers(f"{name}(x)") != ["cmath"]] == []
    assert implied_headers("y(0) = x(0) * std::max(1, 2);") == []


def test_cmath_and_limits_are_there_without_an_include() -> None:
    text = "std::isnan(NAN) && std::isinf(std::numeric_limits<float>::infinity()) ? std::round(M_PI) : 0"
    assert kernel(text)(torch.zeros(1)).item() == 3
