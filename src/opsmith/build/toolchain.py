"""C++ compiler of this machine."""

from __future__ import annotations

import errno
import functools
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from opsmith import config, errors
from opsmith.build.compiler_options import refuse_missing_library
from opsmith.build.elf import fault_of
from opsmith.build.processor import cpu_info

NAMES = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-O3", "-g1", "-march=native", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math"),  # needed to vectorize some loops
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pipe"),
    "-Wl,--no-undefined",  # an undefined symbol is reported by the linker, not when the library is loaded
    *("-Wl,--wrap=exit", "-ldl"),  # kernels call a wrapper of `exit`, see codegen.py
)
"""Flags of kernels: no `-ffast-math`, because checks compare nan and inf; line numbers for crash reports."""
VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("LD_RUN_PATH", "SOURCE_DATE_EPOCH", "CCC_OVERRIDE_OPTIONS", "GCC_COMPARE_DEBUG"),
)
"""Environment variables that change what a compiler builds."""
UNWANTED = ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES")
"""Environment variables that make a compiler write additional files."""
NOT_STARTED = (126, 127)
"""Exit statuses of POSIX for a program that cannot be started."""
MOST_PRINTED = 1_000_000
"""Maximum number of bytes of a compiler's output that are read."""
LIMIT_S = 600
"""Time limit of the compiler: generous, because a machine may be slow."""


@dataclass(frozen=True, slots=True)
class CompilerOutput:
    """Exit status and output of a compiler."""

    status: int
    printed: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    """C++ compiler.

    Attributes:
        command: Program and its first arguments, which are the same in each run.
        identity: Text that differs between versions of the program.
    """

    command: tuple[str, ...]
    identity: str

    def run(self, arguments: list[str], directory: Path) -> CompilerOutput:
        """Run the compiler in a directory.

        Raises:
            ToolchainError: If it does not run, or does not end in time.
            OSError: If the disk is full.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        environment = {**inherited, "LC_ALL": "C", "CCACHE_DISABLE": "1"}  # its messages are parsed
        try:
            with (
                subprocess.Popen(
                    self._command(arguments),
                    cwd=directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    process_group=0 if os.name == "posix" else None,
                ) as process,
                killed_whole(process),
            ):
                output, _ = process.communicate(timeout=LIMIT_S)
            printed = _STYLE.sub("", output[:MOST_PRINTED].decode(errors="surrogateescape"))
            if process.returncode in NOT_STARTED:
                raise OSError(printed.strip())
        except (OSError, subprocess.TimeoutExpired) as error:
            if not directory.is_dir():  # a different process cleared the cache
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory)) from error
            raise errors.ToolchainError(
                "the C++ compiler does not run",
                expected=f"a compiler that ends within {LIMIT_S} s",
                got=f"{shlex.join(self.command)}: {error}",
                hint=f"make `{shlex.join(self.command)} --version` work, or name a different compiler in CXX",
            ) from error
        status = process.returncode or self._status_by_file(arguments, directory, printed)
        for number, text in _DISK_FAULTS.items() if status else ():
            if text in printed:
                raise OSError(number, text, str(directory))
        self._refuse_failure(status, printed)
        if status and arguments is not _TRIAL:
            self.refuse_unfit()
        return CompilerOutput(status, printed)

    def refuse_unfit(self) -> None:
        """Raise an error if the program cannot compile a trivial file.

        Raises:
            ToolchainError: If it cannot.
        """
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "trial.cpp").write_text("int opsmith_trial;\n", encoding="utf-8")
            self.build(
                "a file of one line",
                _TRIAL,
                Path(folder),
                f"a compiler that takes `{shlex.join(FLAGS)}`",
                ", or unset it" if config.compiler() else "",
            )

    def build(self, made: str, arguments: list[str], directory: Path, expected: str, hint: str = "") -> None:
        """Run the compiler on a source that opsmith wrote, and that it must accept.

        Args:
            made: Words for the source. arguments: Arguments of the compiler. directory: Folder in which it
                runs. expected: Words for a compiler that accepts it.
            hint: What to do without one.

        Raises:
            CompileError: If the linker does not find a library that the author names.
            ToolchainError: If it fails, or writes no complete file.
        """
        done = self.run(arguments, directory)
        if done.status:
            refuse_missing_library(done.printed)
            raise errors.ToolchainError(
                f"the C++ compiler does not compile {made}",
                expected=expected,
                got=done.printed.strip()[-2000:]
                or f"it printed nothing, and ended with the exit status {done.status}",
                hint=f"name a different compiler in CXX{hint}",
            )
        self.refuse_incomplete(directory / arguments[arguments.index("-o") + 1])

    def _status_by_file(self, arguments: list[str], directory: Path, printed: str) -> int:
        """Return 1 if there is no output file, else 0: the real exit status may be lost.

        Python reports 0 if SIGCHLD is ignored, or if a different thread or a handler waits for all children.
        """
        written = directory / arguments[arguments.index("-o") + 1] if "-o" in arguments else directory
        if os.path.lexists(written) or not directory.is_dir():
            return 0
        if not printed.strip():
            self.refuse_incomplete(written)
        return 1

    def refuse_incomplete(self, path: Path) -> None:
        """Raise an error if the compiler reports success, but the file is missing or incomplete.

        Args:
            path: A library or an object file.

        Raises:
            ToolchainError: If it is not complete.
        """
        fault = fault_of(path)
        if fault is not None:
            raise errors.ToolchainError(
                "the C++ compiler reports success, but wrote no complete file",
                expected=f"{path.name}, an ELF file",
                got=fault,
                hint=f"check what `{shlex.join(self.command)}` is, or name a different compiler in CXX",
            )

    def _command(self, arguments: list[str]) -> list[str]:
        """Return the command, with a prefix that kills the compiler and its children if this thread ends."""
        wrapper = _dying_wrapper()
        if not wrapper:
            return [*self.command, *arguments]
        inner = ["-wrapper", ",".join(wrapper)] if _GCC.search(self.identity.split()[0]) else []
        return [*wrapper, *self.command, *arguments, *inner]

    def _refuse_failure(self, status: int, printed: str) -> None:
        """Raise an error for a failure of the compiler itself, which is no fault of the source."""
        if status < 0:
            printed = f"{_signal(-status)} signal terminated program {Path(self.command[0]).name}"
        for (problem, hint), pattern in _FAILURES.items() if status else ():
            found = pattern.search(printed)
            if found is not None:
                raise errors.ToolchainError(
                    problem,
                    expected="a compiler that ends by itself",
                    got=found[0],
                    hint=f"{hint}; or name a different compiler in CXX",
                )


def _signal(number: int) -> str:
    """Return the name of a signal; or its number if it has none, as a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


_TRIAL = [*FLAGS, "trial.cpp", "-o", "trial.so"]
_GCC = re.compile(r"(?:^|[/-])g\+\+(?:-[\d.]+)?$")
_DISK_FAULTS = {
    number: os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
}
_DISK_FAULTS[errno.EFBIG] = "File size limit exceeded"  # by a signal, before the system call answers
"""Texts that compilers print if the disk is full."""
_MEMORY = "make more memory available: the system kills programs that need too much memory"
_FAILURES = {
    ("the C++ compiler died of a signal", _MEMORY): re.compile(
        r"\b\w[\w ]* signal terminated program [\w+.-]+"
    ),
    ("the C++ compiler gets no memory", _MEMORY): re.compile(
        r"^virtual memory exhausted: .+|^\S+: out of memory allocating .+", re.MULTILINE
    ),
    (
        "the C++ compiler cannot run one of its programs",
        "install the compiler completely, on Debian or Ubuntu with `apt-get install g++`",
    ): re.compile(r"(?<=fatal error: )cannot (?:execute|find) .+"),
}
"""Failures of compilers themselves: problem and hint, by a pattern of the output."""
_STYLE = re.compile(r"\x1b\[[\d;]*[mK]")
"""Escape sequences of colours, such as from `-fdiagnostics-color`, which are removed from messages."""


@contextmanager
def killed_whole(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process with its process group if an exception ends the region.

    Args:
        process: Process that is the leader of its process group.
    """
    try:
        yield
    except BaseException:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


@functools.cache
def _dying_wrapper() -> tuple[str, ...]:
    """Return util-linux's command that kills a process when its parent ends; empty if there is none."""
    program = shutil.which("setpriv")
    if program is None:
        return ()
    command = (program, "--pdeathsig", "KILL")
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    except OSError:
        return ()
    return () if tried.returncode else command


def find_toolchain() -> Toolchain:
    """Return the compiler that `CXX` names, or else the first of `g++`, `clang++` and `c++` in PATH.

    Raises:
        ToolchainError: If there is none.
    """
    named = config.compiler()
    return _toolchain(named, os.environ.get("PATH", ""))


@functools.cache
def _toolchain(named: str, path: str) -> Toolchain:
    try:
        candidates = [shlex.split(named)] if named else [[name] for name in NAMES]
    except ValueError as error:
        raise errors.ToolchainError(
            "CXX is not a command",
            expected="a program, and options after it, with closed quotation marks",
            got=f"{named!r}: {error}",
            hint="set CXX to the command that runs your compiler, or unset it",
        ) from None
    for candidate in candidates:
        program = shutil.which(candidate[0], path=path)
        if program is not None:
            # It runs in different directories, where `./compiler` would not name it.
            return Toolchain((os.path.abspath(program), *candidate[1:]), _identity(candidate, path))
    got, program = f"none of {', '.join(NAMES)} in PATH", candidates[0][0]
    if named and os.path.dirname(program):
        got = f"`{program}` cannot be run" if os.path.exists(program) else f"there is no file `{program}`"
    elif named:
        got = f"no `{program}` in PATH"
    raise errors.ToolchainError(
        "there is no C++ compiler",
        expected=f"the program that CXX names, `{named}`" if named else f"one of {', '.join(NAMES)}",
        got=got,
        hint="install a C++ compiler, on Debian or Ubuntu by `apt-get install g++`, or name yours in CXX; "
        "until then the reference computes the operator",
    )


def _identity(command: list[str], path: str) -> str:
    """Return the identities of all programs in a command, and of all programs of these names in PATH.

    A wrapper runs the program that follows it, as in `ccache g++`, or the next program of the same name in
    PATH.
    """
    folders = path.split(os.pathsep)
    named = [os.path.join(folder, Path(word).name) for word in command for folder in folders]
    programs = [shutil.which(command[0], path=path), *map(shutil.which, [*command[1:], *named])]
    return "\n".join(dict.fromkeys(file_identity(Path(each)) for each in programs if each))


def compiler_variables() -> str:
    """Return the environment variables that change what a compiler builds, for cache keys."""
    return "\0".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)


def file_identity(path: Path) -> str:
    """Return path, size and time of a compiler's file; this is faster than to ask for its version."""
    resolved = path.resolve()
    state = resolved.stat()
    return f"{resolved} {state.st_size} {state.st_mtime_ns}"


@functools.cache
def cpu_model() -> str:
    """Return name and features of the processor, for cache keys."""
    wanted = ("model name", "flags", "Features", "CPU part")
    described = [f"{name} : {value}" for name, value in cpu_info().items() if name in wanted]
    return "; ".join(described) or f"{platform.machine()} {platform.processor()}"


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
