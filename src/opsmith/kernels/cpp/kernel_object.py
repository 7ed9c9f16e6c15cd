"""Object file of a C++ kernel that can be linked into a library, from the cache or compiled now."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import torch

from opsmith import errors
from opsmith.build.cache import key_of
from opsmith.build.toolchain import FLAGS, LIMIT_S
from opsmith.kernels.cpp.codegen import TABLE, kernel_code
from opsmith.kernels.cpp.compiler import KernelCompiler, include_flags, kernel_toolchain
from opsmith.kernels.cpp.source import CppSource
from opsmith.kernels.runtime.linked_library import LINKING, OBJECT, KernelObject

KIND = "kernel object"

THIS_PROCESSOR = tuple(flag for flag in FLAGS if not flag.startswith(("-Wl", "-g", "-shared", "-l")))
"""Flags that omit debug information, so that the library contains no paths of this machine."""


def flags_for(processor: str) -> tuple[str, ...]:
    """Return the flags for a processor: `native` or a value of `-march=`."""
    return tuple(f"-march={processor}" if flag == "-march=native" else flag for flag in THIS_PROCESSOR)


def kernel_object(
    source: CppSource, operator: str, dtypes: tuple[torch.dtype, ...], processor: str
) -> KernelObject:
    """Compile a kernel for a library, or find it in the cache.

    Args:
        source: The author's source.
        operator: Name of the operator.
        dtypes: The dtypes for which a template is instantiated.
        processor: See `flags_for`.

    Raises:
        CompileError: If the compiler refuses the source.
        ToolchainError: If there is no compiler, or one of its tools is missing.
    """
    toolchain = kernel_toolchain()
    flags = [*flags_for(processor), *include_flags(source), *source.options.compiling, *_path_flags(source)]
    if "clang" not in toolchain.identity:
        flags.append("-fno-gnu-unique")  # otherwise a process merges equal names of different libraries
    text = kernel_code(source, operator, dtypes)
    compiler = KernelCompiler(toolchain, source, operator, text, flags)
    table = f"{TABLE}_{key_of(compiler.parts(KIND))}"

    def build(compiler: KernelCompiler, directory: Path) -> None:
        compiler.run(["-c", "-o", "compiled.o"], directory)
        # Definitions shared between templates are merged here, before other kernels are linked.
        merging = ["-r", "-nostdlib", "-Wl,--force-group-allocation", "-Wl,--wrap=exit", "compiled.o"]
        toolchain.build("an object of a kernel", [*merging, "-o", "alone.o"], directory, LINKING)
        _make_local(directory, table)

    path = compiler.obtain(KIND, build).directory / OBJECT
    return KernelObject(table, path, tuple(source.options.linking(toolchain)))


def _path_flags(source: CppSource) -> list[str]:
    """Return the flags that shorten `__FILE__`, which `assert` uses, to the name of a file."""
    folders = {str(Path(source.path).parent), source.folder or ""}
    return [f"-fmacro-prefix-map={each}/=" for each in sorted(folders) if Path(each).is_absolute()]


def _objcopy() -> str | None:
    return shutil.which("objcopy")


def _make_local(directory: Path, table: str) -> None:
    """Make all symbols of a kernel local, except its table, which gets a unique name."""
    program = _objcopy()
    if program is None:
        raise errors.ToolchainError(
            "linking a kernel needs `objcopy`, which comes with GNU's linker",
            expected="`objcopy` in PATH",
            got="no program with this name",
            hint="install GNU binutils; on Debian or Ubuntu with `apt-get install binutils`",
        )
    command = [program, f"--redefine-sym={TABLE}={table}", f"--keep-global-symbol={table}", "alone.o", OBJECT]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _objcopy_error(f"`objcopy` did not end within {LIMIT_S} s") from error
    if done.returncode:
        raise _objcopy_error(done.stderr.decode(errors="replace").strip())


def _objcopy_error(got: str) -> errors.ToolchainError:
    return errors.ToolchainError(
        "`objcopy` failed to make a kernel's symbols local",
        expected="GNU binutils 2.29 or later",
        got=got,
        hint="install GNU binutils; on Debian or Ubuntu with `apt-get install binutils`",
    )
