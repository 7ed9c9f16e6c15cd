"""The C++ compiler of this machine: which it is, how it is called, and what it says."""

from __future__ import annotations

import errno
import functools
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from opsmith import config, errors

NAMES = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-O3", "-g1", "-march=native", "-fopenmp"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pipe"),
    "-Wl,--no-undefined",  # a name that nothing defines is an error now, and not when the library is loaded
    *("-Wl,--wrap=exit", "-ldl"),  # a kernel calls a function of its own library instead, see generating.py
)
"""Without `-ffast-math`: a kernel is held to the reference in nan and inf as well. With lines (`-g1`), so
that a crash can be told with its own."""
LIMIT_S = 600
"""A compiler that takes longer is killed: kernels are small, and a machine may be slow."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler did: its exit status, and all that it printed."""

    status: int
    printed: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A C++ compiler.

    Attributes:
        command: How it is called, first the program and then what always follows it.
        identity: Names this very program: another version of it has another identity.
    """

    command: tuple[str, ...]
    identity: str

    def run(self, arguments: list[str], directory: Path) -> Compiled:
        """Run the compiler in a directory.

        Raises:
            ToolchainError: If it does not run, or does not end.
            OSError: If the disk is full: no word about the source.
        """
        command = [*self.command, *arguments]
        environment = {**os.environ, "LC_ALL": "C", "CCACHE_DISABLE": "1"}  # its messages are read
        try:
            done = subprocess.run(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            if not directory.is_dir():  # somebody cleared the cache
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory)) from error
            raise errors.ToolchainError(
                "the C++ compiler does not run",
                expected=f"a compiler that ends within {LIMIT_S} s",
                got=f"{shlex.join(self.command)}: {error}",
                hint=f"see that `{shlex.join(self.command)} --version` works, or name another one in CXX",
            ) from error
        printed = done.stdout.decode(errors="replace")
        if done.returncode and os.strerror(errno.ENOSPC) in printed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        return Compiled(done.returncode, printed)


def find_toolchain() -> Toolchain:
    """The compiler that `CXX` names, or else the first of `g++`, `clang++` and `c++` that there is.

    Raises:
        ToolchainError: If there is none.
    """
    named = config.compiler()
    return _toolchain(named, os.environ.get("PATH", ""))


@functools.cache
def _toolchain(named: str, path: str) -> Toolchain:
    for candidate in [shlex.split(named)] if named else [[name] for name in NAMES]:
        program = shutil.which(candidate[0], path=path)
        if program is not None:
            return Toolchain((program, *candidate[1:]), _identity(Path(program)))
    raise errors.ToolchainError(
        "there is no C++ compiler",
        expected=f"the program that CXX names, `{named}`" if named else f"one of {', '.join(NAMES)}",
        got="none of that name in PATH",
        hint="install one, on Debian or Ubuntu by `apt-get install g++`, or name yours in CXX; "
        "until then the reference computes the operator",
    )


def _identity(program: Path) -> str:
    """The program's file, for to ask for its version takes longer than to load a kernel."""
    resolved = program.resolve()
    state = resolved.stat()
    return f"{resolved} {state.st_size} {state.st_mtime_ns}"


@functools.cache
def cpu_model() -> str:
    """The processor, as far as code that was built for it depends on it: its name and what it can do."""
    described = Path("/proc/cpuinfo")
    if described.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = described.read_text(errors="replace").partition("\n\n")[0].splitlines()
        return "; ".join(" ".join(line.split()) for line in lines if line.startswith(wanted))
    return f"{platform.machine()} {platform.processor()}"
