"""`opsmith doctor`: every thing that opsmith uses is listed, and what is missing has its command."""

import builtins
import functools
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaged_kernels import PACKAGE, RUNNABLE, build_into, edit_manifest, scaled
from typer.testing import Result

from opsmith import config, errors
from opsmith.build import toolchain
from opsmith.build.manifest import BuiltFile
from opsmith.build.packaged import looking_in
from opsmith.cli import doctor, inventory
from opsmith.kernels.cuda import nvrtc
from opsmith.torch_library.capabilities.capability import CAPABILITIES, capability_statuses

Run = Callable[..., Result]

NAMES = [
    "Python",
    "torch",
    "rich",
    "typer",
    "C++ compiler",
    "built kernels",
    "calls in C++",
    "GPU",
    "NVRTC",
    "Triton",
    "ONNX",
    "ONNX Script",
    "ONNX Runtime",
    "pygraphviz",
    "matplotlib",
    "MCP",
    "scikit-learn",
]


def entries(done: Result) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(done.stdout)["entries"]}


@functools.cache
def once(conservative: bool) -> Any:
    """The statuses, computed once in each mode."""
    return capability_statuses()


@pytest.fixture
def listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-tests of the capabilities run once for all tests of what is installed: they take a second."""
    monkeypatch.setattr(doctor, "capability_statuses", lambda: once(config.conservative()))


@pytest.fixture
def looked_for_anew() -> Iterator[None]:
    """The compiler is looked for again: a process remembers it by CXX and PATH."""
    toolchain._toolchain.cache_clear()
    yield
    toolchain._toolchain.cache_clear()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, listed_once: None, looked_for_anew: None) -> None:
    """A machine with torch, typer and rich, and nothing else."""
    version, find = metadata.version, importlib.util.find_spec

    def only(name: str) -> str:
        if name not in ("rich", "typer"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    def own(name: str, package: str | None = None) -> Any:
        return find(name, package) if name.startswith("opsmith") else None

    monkeypatch.setattr(metadata, "version", only)
    monkeypatch.setattr(importlib.util, "find_spec", own)
    monkeypatch.setattr(shutil, "which", lambda *arguments, **options: None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(inventory, "calls_extension", lambda: None)
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("listed_once")
def test_everything_is_listed(opsmith: Run) -> None:
    done = opsmith("doctor", "--json")
    assert done.exit_code == 0
    read = json.loads(done.stdout)
    assert (read["schema"], read["works"]) == (2, True)
    assert list(entries(done)) == NAMES
    assert entries(done)["torch"]["found"] == torch.__version__
    for entry in read["entries"]:
        assert (entry["hint"] is None) == (entry["found"] is not None)


@pytest.mark.usefixtures("listed_once")
def test_a_terminal_sees_that_it_is_at_work(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opsmith("doctor", "--json").stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal then
    monkeypatch.setenv("TERM", "xterm")
    done = opsmith("doctor", "--json")
    assert "looking at this machine" in done.stderr
    assert list(entries(done)) == NAMES


@pytest.mark.usefixtures("listed_once")
def test_the_table_says_that_it_works(opsmith: Run) -> None:
    done = opsmith("doctor")
    assert done.exit_code == 0
    for name in NAMES:
        assert name in done.stdout
    assert "works here" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("bare")
def test_a_bare_machine_works_and_is_told_the_commands(opsmith: Run) -> None:
    done = opsmith("doctor", "--json")
    assert done.exit_code == 0
    hints = {name: entry["hint"] for name, entry in entries(done).items() if entry["hint"]}
    assert list(hints) == NAMES[4:]
    for name, command in {
        "NVRTC": "pip install nvidia-cuda-nvrtc",
        "Triton": "pip install '.[triton]' in a checkout of opsmith",
        "ONNX": "pip install onnx",
        "ONNX Script": "pip install onnxscript",
        "ONNX Runtime": "pip install onnxruntime",
        "pygraphviz": "pip install '.[draw]' in a checkout of opsmith",
        "matplotlib": "pip install '.[benchmark]' in a checkout of opsmith",
        "MCP": "pip install '.[mcp]' in a checkout of opsmith",
        "scikit-learn": "pip install '.[tour]' in a checkout of opsmith",
    }.items():
        assert hints[name].startswith(command)
    shown = " ".join(opsmith("doctor").stdout.split())
    assert (
        "A missing package, or a capability that is off, is only needed for the features next to it." in shown
    )


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("system", "command"),
    [
        ("Linux", "sudo apt-get install g++"),
        ("Darwin", "xcode-select --install"),
        ("Windows", "winget install Microsoft.VisualStudio.2022.BuildTools"),
        ("Plan9", "install g++ or clang++"),
    ],
)
def test_the_compiler_is_installed_as_the_system_does(
    opsmith: Run, monkeypatch: pytest.MonkeyPatch, system: str, command: str
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    assert entries(opsmith("doctor", "--json"))["C++ compiler"]["hint"].startswith(command)


NAMED: dict[str, str | None] = {
    "unset": None,
    "empty": "",
    "blank": " ",
    "a-name": "g++",
    "a-path": shutil.which("g++"),
    "options": "g++ -O1 -DNAMED",
    "a-launcher": "env g++",
    "no-program": "no-such-compiler -O1",
    "no-file": "/nowhere/g++",
    "a-folder": "/usr/bin",
    "no-executable": __file__,
    "an-open-quotation-mark": "g++ 'x",
    "quotation-marks-alone": "''",
    "not-a-compiler": "ls",
    "no-output": "true",
    "not-of-cpp": "python3",
}
"""Values of CXX."""


@pytest.mark.every(4)
@pytest.mark.usefixtures("listed_once", "looked_for_anew")
@pytest.mark.parametrize("case", NAMED)
def test_it_finds_the_compiler_that_builds_kernels(
    opsmith: Run, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(inventory, "ENTRIES", (inventory._compiler,))
    monkeypatch.delenv("CXX", raising=False)
    if NAMED[case] is not None:
        monkeypatch.setenv("CXX", NAMED[case])
    try:
        toolchain.find_toolchain().refuse_unfit()
        command = toolchain.find_toolchain().command
    except errors.ToolchainError as error:
        expected = None
        refused = f"{error.problem}: {error.got}"
    else:
        expected = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    entry = entries(opsmith("doctor", "--json"))["C++ compiler"]
    assert (expected is None) == case.startswith(("no-", "not-", "a-folder", "an-open", "quotation"))
    if expected is not None:
        assert entry["found"] == expected.splitlines()[0]
        return
    assert entry["found"] is None
    assert entry["hint"] == f"{refused}; name your compiler in CXX, or unset CXX"
    monkeypatch.delenv("CXX")  # as the hint says
    assert entries(opsmith("doctor", "--json"))["C++ compiler"]["found"]


@pytest.mark.slow
def test_calls_in_cpp_that_are_turned_off_are_turned_on(
    opsmith: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "calls_extension", lambda: None)
    for value, hint in (("1", "turns calls in C++ off: unset this variable"), ("", "opsmith build --calls")):
        monkeypatch.setenv(config.PYTHON_CALLS, value)
        assert hint in entries(opsmith("doctor", "--json"))["calls in C++"]["hint"]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("cuda", "gpu", "nvrtc"),
    [
        (None, "this torch is built for the CPU", "pip install nvidia-cuda-nvrtc"),
        ("12.8", "nvidia-smi shows whether the driver sees a GPU", "pip install nvidia-cuda-nvrtc-cu12"),
        ("13.0", "nvidia-smi shows whether the driver sees a GPU", "pip install nvidia-cuda-nvrtc"),
    ],
)
def test_the_gpu_advice_follows_from_the_torch_that_is_here(
    opsmith: Run, monkeypatch: pytest.MonkeyPatch, cuda: str | None, gpu: str, nvrtc: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    found = entries(opsmith("doctor", "--json"))
    assert found["GPU"]["hint"].startswith(gpu)
    assert found["NVRTC"]["hint"] == nvrtc


@pytest.mark.usefixtures("listed_once")
def test_an_old_torch_is_status_1(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    done = opsmith("doctor", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["works"] is False
    assert entries(done)["torch"]["hint"] == "pip install --upgrade 'torch>=2.11' (this is 2.4.1+cpu)"
    assert "does not work here: fix the lines marked in red" in opsmith("doctor").stdout


@pytest.mark.usefixtures("listed_once")
def test_nothing_missing_is_said(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there = lambda: inventory.InventoryItem("x", "1.0", "all", "")
    monkeypatch.setattr(inventory, "ENTRIES", (there,))
    monkeypatch.delenv("OPSMITH_CONSERVATIVE", raising=False)
    assert "works here, and nothing is missing" in opsmith("doctor").stdout


@pytest.mark.slow
def test_capabilities_are_listed_with_what_is_on(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPSMITH_CONSERVATIVE", raising=False)
    rows = json.loads(opsmith("doctor", "--json").stdout)["capabilities"]
    assert [row["name"] for row in rows] == list(CAPABILITIES)
    for row in rows:
        assert (row["on"], row["why"], row["instead"]) == (True, None, None)
        assert row["required"] == (CAPABILITIES[row["name"]].instead is None)


def test_conservative_is_why_they_are_off(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSMITH_CONSERVATIVE", "1")
    done = opsmith("doctor", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)["capabilities"]}
    assert done.exit_code == 0
    assert rows.pop("dispatch")["on"] is True
    for name, row in rows.items():
        assert (row["on"], row["why"]) == (False, "OPSMITH_CONSERVATIVE=1")
        assert row["instead"] == CAPABILITIES[name].instead
    shown = opsmith("doctor").stdout
    assert "off:" in shown
    assert "A missing package, or a capability that is off, is only needed" in " ".join(shown.split())


@pytest.mark.slow
def test_without_what_is_required_it_is_status_1(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise AssertionError("a kernel below autograd was recorded")

    monkeypatch.setattr(
        import_module("opsmith.torch_library.capabilities.private.dispatch"), "self_test", fails
    )
    done = opsmith("doctor", "--json")
    read = json.loads(done.stdout)
    assert (done.exit_code, read["works"]) == (1, False)
    assert read["capabilities"][0]["why"] == "AssertionError: a kernel below autograd was recorded"
    shown = " ".join(opsmith("doctor").stdout.split())
    assert "does not work here: fix the lines marked in red" in shown


def test_a_version_is_the_line_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(said: str) -> Any:
        return lambda *arguments, **options: subprocess.CompletedProcess([], 0, said, "")

    monkeypatch.setattr(
        subprocess, "run", answer("a compiler\nCopyright (c) 2005-2025\nrelease 13.0, V13.0.1")
    )
    assert inventory.version_of("nvcc") == "release 13.0, V13.0.1"
    monkeypatch.setattr(subprocess, "run", answer(""))
    assert inventory.version_of("/bin/quiet") == "/bin/quiet"

    def fails(*arguments: Any, **options: Any) -> Any:
        raise OSError

    monkeypatch.setattr(subprocess, "run", fails)
    assert inventory.version_of("/bin/broken") == "/bin/broken"


def test_ctrl_c_has_status_130(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise builtins.KeyboardInterrupt

    monkeypatch.setattr(inventory, "ENTRIES", (interrupted,))
    done = opsmith("doctor")
    assert (done.exit_code, done.stderr) == (130, "opsmith: interrupted\n")


@pytest.mark.slow
@pytest.mark.usefixtures("listed_once")
def test_of_a_package_it_says_where_each_kernel_comes_from(
    opsmith: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    level = RUNNABLE[0]
    build_into(tmp_path / "_kernels", cpu=level, cuda="sm_80")
    with looking_in(PACKAGE, tmp_path / "_kernels", (level, "sm_80", "compute_80")):
        scaled().reload()
        done = opsmith("doctor", str(PACKAGE), "--json")
        shown = opsmith("doctor", str(PACKAGE)).stdout
    rows = [
        (each["operator"], each["origin"], each["missing"]) for each in json.loads(done.stdout)["kernels"]
    ]
    in_cuda = "built into the package for sm_80, compute_80"
    assert rows == [
        ("scaled_package::scaled", in_cuda, False),
        ("scaled_package::scaled", f"built into the package for {level}", False),
        ("scaled_package::shifted", in_cuda, False),
    ]
    assert f"built into the package for {level}" in shown
    monkeypatch.setenv("CXX", "no-such-compiler")
    toolchain._toolchain.cache_clear()
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: ())
    scaled().reload()
    shown = " ".join(opsmith("doctor", str(PACKAGE)).stdout.split())
    assert "the reference runs: there is no C++ compiler: no `no-such-compiler` in PATH" in shown
    assert "the reference runs: there is no NVRTC, which compiles CUDA C++: none is found" in shown
    edit_manifest(
        tmp_path / "_kernels", lambda held: [each.update(digest="0" * 64) for each in held["files"]]
    )
    with looking_in(PACKAGE, tmp_path / "_kernels", (level, "sm_80", "compute_80")):
        scaled().reload()
        done = opsmith("doctor", str(PACKAGE), "--json")
    origins = [each["origin"] for each in json.loads(done.stdout)["kernels"]]
    reason = f"or signature) has changed since the build in {tmp_path / '_kernels'}"
    assert [each.endswith(reason) for each in origins[:2]] == [True, True], origins
    toolchain._toolchain.cache_clear()
    scaled().reload()


@pytest.mark.usefixtures("listed_once")
def test_opsmith_s_own_built_kernels_are_listed(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    level = RUNNABLE[-1]
    built = BuiltFile(operator="opsmith::rope_", language="C++", digest="", abi=1, target=level)
    monkeypatch.setattr(inventory, "packaged_in", lambda package: (built,))
    found = entries(opsmith("doctor", "--json"))["built kernels"]["found"]
    assert found == f"for {level}; this processor has {RUNNABLE[-1]}"


PYTHON_ALONE = """
import opsmith
from torch import Tensor

@opsmith.operator("{space}::plain")
def plain(x: Tensor) -> Tensor:
    return x * 2
"""


@pytest.mark.usefixtures("listed_once")
def test_what_it_cannot_look_at_and_warnings_are_lines_of_the_report(
    opsmith: Run, write: Callable[..., Path], space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    package = write(PYTHON_ALONE, f"{space}_python/__init__.py").parent
    write("import no_such_module_of_doctor", f"{package.name}/extra.py")
    manifest = write("[]", f"{package.name}/_kernels/manifest.json")
    monkeypatch.setattr(inventory, "package_of", lambda file: package)
    done = opsmith("doctor", str(package))
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        f"{package.name}: no kernel from a source is declared, and none is built",
        f"not inspected: `{package.name}.extra` cannot be imported: ModuleNotFoundError: "
        "No module named 'no_such_module_of_doctor'",
    ]
    assert lines[2].startswith(
        f"warning: the built kernels of {manifest} are not used: it is damaged: it is not a "
    )
    assert "works here" in done.stdout
    read = json.loads(opsmith("doctor", str(package), "--json").stdout)
    assert (read["kernels"], len(read["broken"])) == ([], 1)
