"""The compiler that is found, what decides a library's key, and what is said where it does not run."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from opsmith import config, errors
from opsmith.build import toolchain
from opsmith.build.elf import fault_of
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


TRIED = 'case "$*" in *trial.cpp*) exec g++ "$@";; esac; '
"""Script of a compiler that compiles the file of one line."""


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


@pytest.mark.parametrize("named", ["wrapper mine", "mine"])
def test_a_compiler_behind_a_wrapper_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    wrappers, real = tmp_path / "wrappers", tmp_path / "real"
    for folder in (wrappers, real):
        folder.mkdir()
    program(wrappers, "wrapper", "exit 0")
    (wrappers / "mine").symlink_to("wrapper")  # runs the next of its own name, as ccache does
    program(real, "mine", "exit 0")
    monkeypatch.setenv("PATH", f"{wrappers}:{real}")
    monkeypatch.setenv("CXX", named)
    before = find_toolchain().identity
    program(real, "mine", "exit 10")
    toolchain._toolchain.cache_clear()
    assert find_toolchain().identity != before


def test_one_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, "broken", "exit 0")
    path.write_text("no program")
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(errors.ToolchainError) as caught:
        find_toolchain().run(["x.cpp"], tmp_path)
    assert caught.value.message().splitlines()[0] == "the C++ compiler does not run"
    assert f"got: {path}: " in str(caught.value)
    assert f"hint: make `{path} --version` work" in str(caught.value)


@pytest.mark.parametrize(
    ("named", "got"),
    [
        ("ls", "the C++ compiler does not compile a file of one line"),
        ("false", "the C++ compiler does not compile a file of one line"),
        ("true", "the C++ compiler reports success, but wrote no complete file"),
        ("g++ -no-such-option", "the C++ compiler does not compile a file of one line"),
    ],
)
def test_a_program_that_is_no_compiler_is_named_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, got: str
) -> None:
    (tmp_path / "kernel.cpp").write_text("int right;")
    arguments = ["-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    monkeypatch.setenv("CXX", named)
    with pytest.raises(errors.ToolchainError) as caught:
        find_toolchain().run(arguments, tmp_path)
    assert caught.value.problem == got
    assert caught.value.got
    if named == "false":
        assert caught.value.got == "it printed nothing, and ended with the exit status 1"
    assert "or unset it" in str(caught.value.hint) or named == "true"
    monkeypatch.delenv("CXX")  # as the hint says
    assert find_toolchain().run(arguments, tmp_path).status == 0


@pytest.mark.parametrize(
    ("named", "got"),
    [
        ("g++-none", "no `g++-none` in PATH"),
        ("/nowhere/g++ -O1", "there is no file `/nowhere/g++`"),
        ("./none", "there is no file `./none`"),
        ("/usr", "`/usr` cannot be run"),
    ],
)
def test_a_path_is_not_looked_for_in_path(monkeypatch: pytest.MonkeyPatch, named: str, got: str) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(errors.ToolchainError) as caught:
        find_toolchain()
    assert caught.value.got == got


def test_one_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "endless", "exec sleep 60")))
    monkeypatch.setattr(toolchain, "LIMIT_S", 0.2)
    with pytest.raises(errors.ToolchainError, match=r"timed out after 0\.2 seconds"):
        find_toolchain().run([], tmp_path)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("No space left on device", errno.ENOSPC),
        ("Disk quota exceeded", errno.EDQUOT),
        ("Read-only file system", errno.EROFS),
        ("Input/output error", errno.EIO),
        ("File size limit exceeded signal terminated program as", errno.EFBIG),
    ],
)
def test_a_disk_that_takes_no_more_is_no_word_about_the_source(
    words: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"/tmp/x.s: fatal error: error writing to x.s: {words}"
    monkeypatch.setenv("CXX", str(program(tmp_path, "full", f"echo '{said}' >&2; exit 1")))
    with pytest.raises(OSError, match=words.partition(" signal")[0]) as caught:
        find_toolchain().run([], tmp_path)
    assert caught.value.errno == number


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
    from opsmith.kernels.runtime import library as runtime

    monkeypatch.setenv("CXX", str(program(tmp_path, "old", TRIED + "echo 'no C++17 here'; exit 1")))
    monkeypatch.setattr(runtime, "cache_on_disk", lambda: Cache(tmp_path / "cache"))
    with pytest.raises(errors.ToolchainError) as caught:
        runtime.compile_runtime()
    assert caught.value.message().splitlines() == [
        "the C++ compiler does not compile opsmith's own library",
        "  expected: a compiler of C++17, such as g++ 9 or clang 10",
        "  got: no C++17 here",
        "  hint: name a different compiler in CXX",
    ]


def test_on_other_systems_there_are_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.kernels.cpp import compiler
    from opsmith.kernels.runtime import library as runtime

    monkeypatch.setattr(compiler.sys, "platform", "win32")
    with pytest.raises(errors.ToolchainError, match=r"C\+\+ kernels are not built on win32 yet"):
        runtime.compile_runtime()


def test_the_version_of_python_is_that_of_the_header() -> None:
    from opsmith.kernels.common import parameters
    from opsmith.kernels.cpp import compiler, library
    from opsmith.kernels.runtime import library as runtime

    exported: Any = runtime.runtime().opsmith_version()
    assert exported == library.VERSION
    names = [each.strip() for each in _enumerators(compiler.HEADER.read_text(), "ParameterType")]
    assert len(names) == len(parameters.PARAMETER_TYPES)
    assert len(_enumerators(compiler.HEADER.read_text(), "Layout")) == len(parameters.LAYOUTS)


def _enumerators(text: str, name: str) -> list[str]:
    return text.partition(f"enum {name} : int32_t {{")[2].partition("}")[0].split(",")


def test_no_header_of_torch_is_read(tmp_path: Path) -> None:
    from opsmith.kernels.cpp import compiler
    from opsmith.kernels.runtime import library as runtime

    flags = ["-std=c++17", "-H", "-fsyntax-only", f"-I{compiler.HERE}"]
    command = [*find_toolchain().command, *flags, str(runtime.RUNTIME)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    own = {str(path) for path in (compiler.HEADER, *runtime.RUNTIME_HEADERS)}
    read = {str(Path(line.lstrip(". "))) for line in done.stderr.splitlines() if line.startswith(".")}
    assert own <= read
    assert not [path for path in read - own if "torch" in path or "pybind" in path or "Python.h" in path]


def wait_until(happens: Callable[[], bool]) -> None:
    """Wait without a limit of its own: a hang ends the run."""
    while not happens():
        time.sleep(0.02)


def processes_of(folder: Path) -> list[str]:
    """Command lines of the running processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line and path.parent.name != str(os.getpid()):
                found.append(line)
    return found


def test_a_compiler_past_its_limit_is_killed_with_its_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path, "slow", f"tail -f {tmp_path}/slow & tail -f {tmp_path}/slow")
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setattr(toolchain, "LIMIT_S", 0.5)
    with pytest.raises(errors.ToolchainError, match=r"timed out after 0\.5 seconds"):
        find_toolchain().run([], tmp_path)
    wait_until(lambda: not processes_of(tmp_path))


COMPILING = """
import sys
from pathlib import Path
from opsmith.build.toolchain import find_toolchain
folder = sys.argv[1]
find_toolchain().run(["-fsyntax-only", "-iquote", folder, folder + "/kernel.cpp"], Path(folder))
"""


@pytest.mark.skipif(
    not shutil.which("setpriv"), reason="util-linux alone has the kernel end a process with its parent"
)
def test_a_compiler_ends_when_its_process_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless.h")  # the compiler waits for somebody to write into it
    (tmp_path / "kernel.cpp").write_text('#include "endless.h"\n')
    running = subprocess.Popen([sys.executable, "-c", COMPILING, str(tmp_path)])
    wait_until(
        lambda: any("cc1plus" in each for each in processes_of(tmp_path)) or running.poll() is not None
    )
    running.kill()
    running.wait()
    wait_until(lambda: not processes_of(tmp_path))


def test_output_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "loud", "yes 'a warning' | head -c 5000000")))
    assert len(find_toolchain().run([], tmp_path).printed) == toolchain.MOST_PRINTED


@pytest.mark.parametrize(
    ("script", "died"),
    [
        ("kill -KILL $$", "SIGKILL signal terminated program dying"),
        (
            "echo 'g++: fatal error: Killed signal terminated program cc1plus'; exit 1",
            "Killed signal terminated program cc1plus",
        ),
    ],
)
def test_a_compiler_that_a_signal_ends_says_nothing_of_the_source(
    script: str, died: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "dying", script)))
    with pytest.raises(errors.ToolchainError, match="the C\\+\\+ compiler died of a signal") as caught:
        find_toolchain().run([], tmp_path)
    assert caught.value.got == died


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ("virtual memory exhausted: Cannot allocate memory", "gets no memory"),
        ("cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes", "gets no memory"),
        (
            "g++: fatal error: cannot execute 'cc1plus': execvp: No such file",
            "cannot run one of its programs",
        ),
        ("collect2: fatal error: cannot find 'ld'", "cannot run one of its programs"),
    ],
)
def test_a_failure_of_the_compiler_itself_says_nothing_of_the_source(
    printed: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'echo "{printed}"; echo "compilation terminated."; exit 1'
    monkeypatch.setenv("CXX", str(program(tmp_path, "poor", script)))
    with pytest.raises(errors.ToolchainError, match=problem) as caught:
        find_toolchain().run([], tmp_path)
    assert caught.value.got == printed.partition("fatal error: ")[2] or printed


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="this system has no such signal")
def test_an_exit_status_that_nobody_can_know_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent that ignores SIGCHLD hands that on; a thread that waits for all children takes the status."""
    script = TRIED + "echo 'kernel.cpp:1:1: error: no'; exit 1"
    monkeypatch.setenv("CXX", str(program(tmp_path, "refusing", script)))
    found = find_toolchain()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        done = found.run(["kernel.cpp", "-o", "kernel.so"], tmp_path)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (done.status, done.printed) == (1, "kernel.cpp:1:1: error: no\n")


def test_a_preprocessor_that_writes_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "silent", "exit 0")))
    with pytest.raises(errors.ToolchainError, match="reports success, but wrote no complete file"):
        find_toolchain().run(["-E", "kernel.cpp", "-o", "kernel.ii"], tmp_path)


def test_a_compiler_beside_the_current_directory_runs_in_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "here", "echo hello")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./here")
    assert find_toolchain().run([], tmp_path / "other").printed == "hello\n"


def test_colours_are_no_part_of_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = r"\033[01m\033[Kkernel.cpp:1:1:\033[m\033[K error"
    monkeypatch.setenv("CXX", str(program(tmp_path, "painter", f"printf '{printed}'")))
    assert find_toolchain().run([], tmp_path).printed == "kernel.cpp:1:1: error"


FORGETFUL = {
    "nothing": ("exit 0", "there is no such file"),
    "empty": ("touch kernel.so", "it is empty"),
    "text": ("echo done > kernel.so", "it is no ELF file of 64 bits"),
    "link": ("ln -s /bin/ls kernel.so", "it is a link"),
    "half": ("head -c 2000 /bin/ls > kernel.so", "bytes"),
}


@pytest.mark.parametrize("kind", FORGETFUL)
def test_a_library_that_is_not_complete_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, fault = FORGETFUL[kind]
    monkeypatch.setenv("CXX", str(program(tmp_path, "forgetful", script)))
    found = find_toolchain()
    assert found.run([], tmp_path).status == 0
    with pytest.raises(errors.ToolchainError, match="wrote no complete file") as caught:
        found.refuse_incomplete(tmp_path / "kernel.so")
    assert fault in str(caught.value.got)


def test_each_part_of_an_elf_file_counts(tmp_path: Path) -> None:
    whole = Path("/bin/ls").read_bytes()
    path = tmp_path / "library.so"
    path.write_bytes(whole)
    assert fault_of(path) is None
    for length in range(64, len(whole), len(whole) // 50):
        path.write_bytes(whole[:length])
        assert fault_of(path) is not None


def test_a_cxx_that_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'abc")
    with pytest.raises(errors.ToolchainError, match="CXX is not a command") as caught:
        find_toolchain()
    assert caught.value.got == '"g++ \'abc": No closing quotation'


def test_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("OPSMITH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(errors.CacheError, match="there is no home directory") as caught:
        config.cache_directory()
    assert caught.value.hint == "set OPSMITH_CACHE to a directory of your own"


def test_a_signal_without_a_name_is_told_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "dying", "kill -40 $$")))
    with pytest.raises(errors.ToolchainError, match="died of a signal") as caught:
        find_toolchain().run([], tmp_path)
    assert caught.value.got == "40 signal terminated program dying"
