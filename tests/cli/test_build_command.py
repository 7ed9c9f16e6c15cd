"""`opsmith build` compiles the kernels of a package into it; what cannot be built is said in one message."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaged_kernels import PACKAGE, RUNNABLE
from typer.testing import Result

from opsmith.build import toolchain
from opsmith.build.processor import levels
from opsmith.shipping import SourcePackage

BEST = RUNNABLE[-1] if RUNNABLE else "none"
FIRST, SECOND = ([*levels()] or ["none"] * 2)[:2]
Command = Callable[..., Result]
pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no level of this machine's processors is known")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.slow
def test_what_is_built_is_shown_and_lies_in_the_folder(opsmith: Command, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "_kernels"
    for _ in range(2):  # the second replaces what the first has written
        done = opsmith("build", str(PACKAGE), "-o", str(folder), "--cpu", BEST, "--cuda", "sm_80")
        assert done.exit_code == 0, done.output
    lines = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    assert ["opsmith", "runtime", "any"] in [line[:3] for line in lines]
    rows = [line for line in lines if line[0].startswith("scaled_package::") and len(line) > 3]
    assert [row[:3] for row in rows] == [
        ["scaled_package::scaled", "C++", BEST],
        ["scaled_package::scaled", "CUDA", "sm_80"],
        ["scaled_package::scaled", "CUDA", "compute_80"],
        ["scaled_package::shifted", "CUDA", "sm_80"],
        ["scaled_package::shifted", "CUDA", "compute_80"],
    ]
    assert [row[3] for row in rows[1:]] == ["2", "2", "1", "1"]
    assert "scaled_package::scaled links m, which its users must have" in done.stdout
    assert re.search(rf"[67] files, [1-9]\d+ kB in {re.escape(str(folder))}", done.stdout)
    assert len([*folder.iterdir()]) in (7, 8)  # calls in C++, too, where they are built
    assert [each.name for each in folder.parent.iterdir()] == ["_kernels"]


@pytest.mark.slow
def test_code_for_one_gpu_alone_is_no_ptx_for_later_ones(opsmith: Command, tmp_path: Path) -> None:
    words = ["build", str(PACKAGE), "-o", str(tmp_path / "_kernels"), "--cpu", "none"]
    said = "no PTX is built, because code for sm_90a uses features that later GPUs may lack; name an"
    done = opsmith(*words, "--cuda", "sm_90a")
    assert done.exit_code == 0, done.output
    assert said in done.stdout
    assert "no PTX" not in opsmith(*words, "--cuda", "sm_90a,sm_80").stdout


def test_a_verified_build(opsmith: Command, tmp_path: Path) -> None:
    folder = tmp_path / "_kernels"
    done = opsmith(
        "build", str(PACKAGE), "-o", str(folder), "--cpu", BEST, "--cuda", "none", "--verify", "--json"
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["written"]
    rows = [each for each in report["kernels"] if each["language"] != "calls"]  # which may be built, or not
    assert [(each["operator"], each["target"]) for each in rows] == [
        ("", "any"),
        ("scaled_package::scaled", BEST),
    ]
    assert report["verification"] == {
        "verified": [f"scaled_package::scaled for {BEST}"],
        "unverified": [],
        "differences": [],
    }
    assert (folder / "manifest.json").exists()


def test_of_kernels_that_differ_nothing_is_written(opsmith: Command, tmp_path: Path) -> None:
    package = PACKAGE.with_name("wrong_package")
    done = opsmith("build", str(package), "-o", str(tmp_path / "_kernels"), "--cpu", BEST, "--verify")
    assert done.exit_code == 1, done.output
    found = (
        f"wrong_package::squared for {BEST}: forward, kernel-mismatch: `result` from the kernel for cpu is"
    )
    assert found in done.stdout
    assert "nothing is written: kernels differ from their references" in done.stdout
    assert [*tmp_path.iterdir()] == []


PLAIN = """
import opsmith
from torch import Tensor

@opsmith.operator("{space}::plain")
def plain(x: Tensor) -> Tensor:
    return x * 2
"""


def refused(done: Result, status: int, *lines: str) -> None:
    assert done.exit_code == status, done.output
    for line in lines:
        assert line in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_no_package_with_kernels(
    opsmith: Command, write: Callable[..., Path], space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(PLAIN.replace("plain", "lonely"), f"{space}_alone.py")
    refused(opsmith("build", "no_such_package_here"), 2, "there is no module `no_such_package_here`")
    refused(opsmith("build", str(file)), 2, "is not a package", "got: a file")
    monkeypatch.chdir(file.parent)
    refused(
        opsmith("build", file.stem), 2, "is not a package", f"got: the file {file}, which is in no package"
    )
    refused(opsmith("build", "torch:add"), 2, "`torch:add` is not a package", "got: the operator `add`")
    package = write(PLAIN, f"{space}_pure/__init__.py").parent
    refused(opsmith("build", str(package)), 2, f"`{package.name}` declares no kernel with source code")
    broken = write("import no_such_module_at_all", f"{space}_broken/__init__.py").parent
    refused(
        opsmith("build", str(broken)), 2, "cannot be imported: ModuleNotFoundError", "no_such_module_at_all"
    )
    parent = opsmith("build", str(file.parent))
    refused(parent, 2, "is not a package", "a folder without `__init__.py`", f" or `{package}`")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--cpu", "x86-64-v9"], "there is no level `x86-64-v9` of linux-"),
        (["--cpu", ","], "`--cpu` names no target"),
        (["--cuda", "gfx90a"], "`gfx90a` is not an architecture of GPUs"),
        (["--cuda", "sm_999"], "NVRTC does not compile for `sm_999`"),
    ],
    ids=str,
)
def test_targets_that_are_not_known(
    options: list[str], problem: str, opsmith: Command, tmp_path: Path
) -> None:
    done = opsmith("build", str(PACKAGE), "-o", str(tmp_path / "_kernels"), *options)
    refused(done, 2, problem)
    assert [*tmp_path.iterdir()] == []


def test_a_build_for_no_target_leaves_the_earlier_one(
    opsmith: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "_kernels")
    assert opsmith("build", str(PACKAGE), "-o", folder, "--cpu", BEST, "--cuda", "none").exit_code == 0
    before = contents(tmp_path / "_kernels")
    refused(
        opsmith("build", str(PACKAGE), "-o", folder, "--cpu", "none", "--cuda", "none"),
        2,
        "no target is left for the kernels of `scaled_package`",
        "argument: --cpu",
        "expected: a target for its kernels in C++ or CUDA C++",
        "got: none\n",
        "hint: name targets such as `--cpu x86-64-v3` or `--cuda sm_90`, or ship only the sources",
    )
    monkeypatch.setattr(sys, "platform", "darwin")  # it has no levels, whatever its processor
    refused(
        opsmith("build", str(PACKAGE), "-o", folder, "--cuda", "none"),
        2,
        "no target is left for the kernels of `scaled_package`",
        "got: none; libraries for darwin-",
    )
    assert contents(tmp_path / "_kernels") == before


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


@pytest.mark.parametrize("last", [False, True], ids=["a library", "the manifest"])
def test_a_build_that_cannot_be_written_leaves_the_earlier_one(
    last: bool, opsmith: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "_kernels"
    command = ("build", str(PACKAGE), "-o", str(folder), "--cuda", "none", "--cpu")
    assert opsmith(*command, FIRST).exit_code == 0
    before = contents(folder)
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if path.parent.parent == tmp_path and (path.name == "manifest.json") is last:
            raise OSError(28, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    refused(opsmith(*command, SECOND), 2, "cannot be written to", "got: No space left on device")
    assert contents(folder) == before
    assert [*tmp_path.iterdir()] == [folder]
    monkeypatch.undo()
    assert opsmith(*command, SECOND).exit_code == 0
    after = contents(folder)
    assert after != before
    names = sorted(name.rsplit(".", 2)[0] for name in after)  # nothing of the earlier one but opsmith's own
    names = [each for each in names if not each.startswith("opsmith.torch-")]  # calls, where they are built
    assert names == ["manifest", "opsmith.any", f"scaled_package.scaled.{SECOND}"]


@pytest.mark.slow
def test_a_part_of_a_package_keeps_what_was_built_of_the_others(
    opsmith: Command, write: Callable[..., Path], space: str
) -> None:
    kernel = (
        '{name}.kernel("cpu", entry="k", cpp="void k(View<const float, 1> x, View<float, 1> y) '
        '{{ for (long i = 0; i < x.size(0); i++) y(i) = 2 * x(i); }}")\n'
    )
    package = write(f"from {space}_parts import first, second", f"{space}_parts/__init__.py").parent
    for name in ("first", "second"):
        text = PLAIN.replace("plain", name) + kernel.format(name=name)
        write(text, f"{space}_parts/{name}.py")

    def built(named: str, level: str, *said: str) -> list[str]:
        done = opsmith("build", named, "--cpu", level)
        assert done.exit_code == 0, done.output
        assert [line for line in done.stdout.splitlines() if line.startswith("kept")] == [*said]
        names = {each.name for each in (package / "_kernels").iterdir()}
        held = json.loads((package / "_kernels" / "manifest.json").read_text())["files"]
        assert names == {"manifest.json", *(each["file"] for each in held)}
        kernels = sorted((each for each in held if each["operator"]), key=lambda each: str(each["operator"]))
        assert {each["language"] for each in held if not each["operator"]} - {"calls"} == {"runtime"}
        return [f"{each['operator'].rpartition('::')[2]} {each['target']}" for each in kernels]

    assert built(str(package), FIRST) == [f"first {FIRST}", f"second {FIRST}"]
    kept = "kept there: 1 file of different modules of the package"
    assert built(f"{space}_parts.first", SECOND, kept) == [f"first {SECOND}", f"second {FIRST}"]
    (library,) = (package / "_kernels").glob("*first*.so")
    library.write_bytes(b"")  # it is not sound
    assert built(f"{space}_parts.second", FIRST) == [f"second {FIRST}"]


def test_a_level_that_the_compiler_does_not_know(
    opsmith: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "old-g++"
    tried = 'case "$*" in *trial.cpp*) exec g++ "$@";; esac'
    program.write_text(f"#!/bin/sh\n{tried}\necho \"error: bad value for '-march=' switch\"\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    toolchain._toolchain.cache_clear()
    done = opsmith("build", str(PACKAGE), "-o", str(tmp_path / "_kernels"), "--cuda", "none")
    first = next(iter(levels()))
    refused(
        done,
        2,
        f"the C++ compiler does not know the processor level `{first}`",
        "bad value for '-march=' switch",
    )


def test_a_folder_with_something_else_is_left_alone(opsmith: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    refused(
        opsmith("build", str(PACKAGE), "-o", str(tmp_path)),
        2,
        "contains files that are not built kernels",
        "got: mine.txt",
    )
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    refused(opsmith("build", str(PACKAGE), "-o", str(link)), 2, "cannot be written to", "got: a link")
    below = str(tmp_path / "mine.txt" / "_kernels")
    refused(
        opsmith("build", str(PACKAGE), "-o", below, "--cpu", "none", "--cuda", "sm_80"),
        2,
        "cannot be written to",
        "expected: a folder in which this user can make files",
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "mine.txt"]


def test_a_kernel_that_does_not_compile(
    opsmith: Command, write: Callable[..., Path], space: str, tmp_path: Path
) -> None:
    kernel = 'plain.kernel("cpu", cpp="void plain(View<const float> x, View<float> y) { nothing(); }")'
    package = write(PLAIN + kernel, f"{space}_wrong/__init__.py").parent
    done = opsmith("build", str(package), "-o", str(tmp_path / "_kernels"), "--cpu", BEST)
    refused(done, 1, f"{space}::plain: the C++ compiler refuses the kernel", "nothing")
    assert not (tmp_path / "_kernels").exists()


def said_in_json(done: Result) -> str:
    """The error on stderr as `--json` writes it to stdout."""
    return json.dumps({"error": done.stderr.removeprefix("opsmith: ").rstrip()}, indent=2) + "\n"


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_without_a_compiler_or_nvrtc_nothing_is_built(
    as_json: bool, opsmith: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_nvrtc: None
) -> None:
    words = ["build", str(PACKAGE), "-o", str(tmp_path / "_kernels"), *["--json"] * as_json]
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = opsmith(*words, "--cpu", BEST, "--cuda", "none")
    refused(done, 2, "there is no C++ compiler", "got: no `no-such-compiler` in PATH")
    assert done.stdout == said_in_json(done) * as_json
    done = opsmith(*words, "--cpu", "none", "--cuda", "sm_80")
    refused(done, 2, "there is no NVRTC, which compiles CUDA C++")
    assert done.stdout == said_in_json(done) * as_json
    assert [*tmp_path.iterdir()] == []


GPU_KERNEL = """
plain.kernel("cuda", grid=1, block=32, DTYPES cuda='''
template <class T> __global__ void plain(Contiguous<const T> x, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * T(2);
}
''')
plain.samples(lambda make: [(make(3),), (make(4),)])
"""


def test_a_kernel_for_gpus_that_does_not_compile(
    opsmith: Command, write: Callable[..., Path], space: str, tmp_path: Path
) -> None:
    text = PLAIN + GPU_KERNEL.replace("DTYPES ", "").replace("T(2);", "T(2)")
    package = write(text, f"{space}_wrong/__init__.py").parent
    done = opsmith("build", str(package), "-o", str(tmp_path / "_kernels"), "--cpu", "none")
    refused(done, 1, f"{space}::plain: NVRTC refuses the kernel", f"{package / '__init__.py'}:12:")
    assert not (tmp_path / "_kernels").exists()


@pytest.mark.slow
def test_a_verified_build_does_not_call_verified_what_ran_on_no_sample(
    opsmith: Command, write: Callable[..., Path], space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, dtypes, reason in (
        ("idle", "dtypes=[torch.int32],", "none of the samples (it takes int32)"),
        ("uncompiled", "", "there is no C++ compiler"),
    ):
        text = (PLAIN + GPU_KERNEL.replace("DTYPES", dtypes)).replace("plain", name)
        package = write("import torch" + text, f"{space}_{name}/__init__.py").parent
        output = str(tmp_path / name / "_kernels")
        done = opsmith(
            *("build", str(package), "-o", output, "--cpu", "none", "--cuda", "sm_80", "--verify", "--json")
        )
        assert done.exit_code == 0, done.output
        verification = json.loads(done.stdout)["verification"]
        assert verification["verified"] == verification["differences"] == []
        (unverified,) = verification["unverified"]
        assert unverified.startswith(f"{space}::{name} in CUDA C++, run on the CPU: ")
        assert reason in unverified
        monkeypatch.setenv("CXX", "no-such-compiler")


def test_flags_beyond_a_level_are_refused(opsmith: Command, write: Callable[..., Path], space: str) -> None:
    kernel = 'plain.kernel("cpu", flags=["-march=native", "-mavx2"], cpp="void plain(View<float> x);")'
    package = write(PLAIN + kernel, f"{space}_flags/__init__.py").parent
    done = opsmith("build", str(package), "--cpu", BEST)
    refused(done, 2, f"{space}::plain: its kernel in C++ has the flag `-mavx2`", "the level replaces")


def test_the_package_of_the_project_in_the_current_directory(
    opsmith: Command, write: Callable[..., Path], space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    write(PLAIN, f"project/src/{space}_named/__init__.py")
    monkeypatch.chdir(project)
    refused(opsmith("build"), 2, f"`{space}_named` declares no kernel with source code")  # the only one
    write(PLAIN.replace("plain", "other"), f"project/src/{space}_other/__init__.py")
    refused(opsmith("build"), 2, "no package is named", f"got: `{space}_named`, `{space}_other`")
    (project / "pyproject.toml").write_text(f'[project]\nname = "{space}-other"\n')
    for named in ([], ["."], [str(project)]):
        refused(opsmith("build", *named), 2, f"`{space}_other` declares no kernel with source code")
    refused(
        opsmith("build", "src"),
        2,
        "`src` is not a package",
        "got: a folder without `__init__.py`",
        f"hint: name `src/{space}_named` or `src/{space}_other`",
    )


KERNEL = 'plain.kernel("cpu", cpp="void plain(View<const float> x, View<float> y) {}")\n'


def test_a_library_in_a_package_is_no_module(
    opsmith: Command, write: Callable[..., Path], space: str
) -> None:
    """A shared library has a name as an extension module has; one that is damaged is reported."""
    package = write(PLAIN, f"{space}_linked/__init__.py").parent
    for place in ("libhelper.so", "inner/libother.so"):
        write("\x7fELF, without what Python calls", f"{package.name}/{place}")
    write("", f"{package.name}/inner/__init__.py")
    refused(opsmith("build", str(package)), 2, f"`{package.name}` declares no kernel with source code")
    write("PyInit_module", f"{package.name}/inner/module.so")
    refused(opsmith("build", str(package)), 2, f"`{package.name}.inner.module` cannot be imported")


def test_a_module_that_cannot_be_imported_leaves_the_others_to_be_built_alone(
    opsmith: Command, write: Callable[..., Path], space: str
) -> None:
    package = write("", f"{space}_extra/__init__.py").parent
    write(PLAIN + KERNEL, f"{package.name}/ops.py")
    write("import no_such_module_of_extra", f"{package.name}/extra.py")
    write("import no_such_module_of_more", f"{package.name}/more/__init__.py")
    refused(
        opsmith("build", str(package)),
        2,
        f"`{package.name}.extra` cannot be imported: ModuleNotFoundError",
        "hint: install the package with the module `no_such_module_of_extra`, or correct the import; "
        f"or build a single module, such as `{package.name}.ops`",
    )
    found = SourcePackage.as_it_is(f"{package.name}.ops")
    assert [kernel.operator.name for kernel in found.kernels] == [f"{space}::plain"]
    assert not found.broken
    whole = SourcePackage.as_it_is(package.name)
    assert whole.kernels == found.kernels
    assert [each.problem.split("`")[1] for each in whole.broken] == [
        f"{package.name}.extra",
        f"{package.name}.more",
    ]


def test_calls_in_cpp(opsmith: Command) -> None:
    """`make setup` has compiled them; else this takes a minute."""
    done = opsmith("build", "--calls", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (Path(report["calls"]) / "opsmith_calls.so").is_file()
    assert report["for"].startswith("torch-")
    done = opsmith("build", "--calls")
    assert done.stdout == f"calls in C++ for {report['for']} are in {report['calls']}\n"


@pytest.mark.parametrize("words", [["--verify"], ["-o", "here"], ["--cpu", "none"], ["package"]])
def test_calls_in_cpp_take_no_other_option(opsmith: Command, words: list[str]) -> None:
    done = opsmith("build", "--calls", *words)
    assert done.exit_code == 2
    assert "is not for calls in C++" in done.stderr
    assert "expected: no option except `--json`" in done.stderr
