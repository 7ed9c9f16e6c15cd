"""C++ compiler of this machine."""

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
    "-Wl,--no-undefined",  # an undefined symbol is an error at link time, not at load time
    *("-Wl,--wrap=exit", "-ldl"),  # kernels call a wrapper of `exit`, see codegen.py
)
"""Flags of kernels. Without `-ffast-math`, because nan and inf are compared with the reference, too. With
line numbers (`-g1`), for reports of crashes."""
VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("LD_RUN_PATH", "SOURCE_DATE_EPOCH", "CCC_OVERRIDE_OPTIONS", "GCC_COMPARE_DEBUG"),
)
"""Environment variables that change what a compiler builds."""
UNWANTED = ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES")
"""Environment variables by which a compiler writes files of its own."""
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
        command: Program and arguments that always follow it.
        identity: Text that differs between versions of the program.
    """

    command: tuple[str, ...]
    identity: str

    def run(self, arguments: list[str], directory: Path) -> CompilerOutput:
        """Run the compiler in a directory.

        Raises:
            ToolchainError: If it does not run, or does not end.
            OSError: If the disk is full.
        """
        command = [*self.command, *arguments]
        inherited = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        environment = {**inherited, "LC_ALL": "C", "CCACHE_DISABLE": "1"}  # its messages are parsed
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
            if not directory.is_dir():  # another process cleared the cache
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
        return CompilerOutput(done.returncode, printed)


def find_toolchain() -> Toolchain:
    """Return the compiler that `CXX` names, or else the first of `g++`, `clang++` and `c++` in PATH.

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
            return Toolchain((program, *candidate[1:]), file_identity(Path(program)))
    raise errors.ToolchainError(
        "there is no C++ compiler",
        expected=f"the program that CXX names, `{named}`" if named else f"one of {', '.join(NAMES)}",
        got="none of that name in PATH",
        hint="install one, on Debian or Ubuntu by `apt-get install g++`, or name yours in CXX; "
        "until then the reference computes the operator",
    )


def compiler_variables() -> str:
    """Return the environment variables that change what a compiler builds, for cache keys."""
    return "\0".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)


def file_identity(path: Path) -> str:
    """Return path, size and time of a compiler's file, which are faster to get than its version."""
    resolved = path.resolve()
    state = resolved.stat()
    return f"{resolved} {state.st_size} {state.st_mtime_ns}"


@functools.cache
def cpu_model() -> str:
    """Return name and features of the processor, for cache keys."""
    described = Path("/proc/cpuinfo")
    if described.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = described.read_text(errors="replace").partition("\n\n")[0].splitlines()
        return "; ".join(" ".join(line.split()) for line in lines if line.startswith(wanted))
    return f"{platform.machine()} {platform.processor()}"
