"""Library between torch and all kernels, once in a process: find, compile and load it."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.build.cache import CacheEntry, cache_on_disk
from opsmith.build.manifest import RUNTIME as LANGUAGE
from opsmith.build.manifest import digest_of_parts
from opsmith.build.packaged import Found, package_of, search
from opsmith.build.toolchain import FLAGS
from opsmith.core.forked_locks import lock_of
from opsmith.kernels.cpp.compiler import HEADER, STUB, build_parts, kernel_toolchain
from opsmith.kernels.cpp.library import VERSION
from opsmith.kernels.runtime.loading import LIBRARY, LibraryFile, loadable, packaged_library

HERE = Path(__file__).parent
RUNTIME = HERE / "runtime.cpp"
RUNNING = tuple(HERE / name for name in ("values.h", "plan.h", "run.h"))
"""Headers for calls by plans, without Python and torch."""
CALLING = (*RUNNING, *(HERE / name for name in ("stable_torch.h", "torch_stack.h", "torch_memory.h")))
"""Headers for calls by plans, including torch's stack and memory."""
PROCESSOR = HERE / "processor.h"
RECIPE = HERE / "recipe.h"
"""Header that computes sizes."""
_PLANNING = HERE / "planning.h"
PLANNING = (RECIPE, _PLANNING, HERE / "launched_kernel.h", HERE / "operators.h")
"""Headers that plan a call without an earlier call of its kind."""
RUNTIME_HEADERS = (*CALLING, RECIPE, _PLANNING, *(HERE / name for name in ("launches.h", "python_errors.h")))
_EXPORTED = "opsmith_hold"
"""One of the names that the library exports."""

_lock = lock_of(sys.modules[__name__], "_lock")
_file: LibraryFile | None = None

_fills_memory = False
"""Current setting of `fill_new_memory`."""


def runtime_file(package: Path | None = None, kernel: str = "") -> LibraryFile:
    """Return the file of the runtime; the first call of a process finds it, and later calls return the same.

    It is searched in opsmith's own package, then in the kernel's package, then in the cache. If it is in none
    of them, it is compiled.

    Args:
        package: Package of the kernel that is being loaded.
        kernel: Description of that kernel, for the error.

    Raises:
        ToolchainError: If the file is not found and cannot be compiled.
    """
    global _file
    with _lock:
        if _file is None:
            _file = _found(package, kernel)
        return _file


def _found(package: Path | None, kernel: str) -> LibraryFile:
    own = package_of(__file__)
    absences = []
    for each in dict.fromkeys((own, package)):
        found = search(each, LANGUAGE, "", runtime_digest, VERSION)
        file = packaged_library(found, _EXPORTED)
        if file is not None:
            return file
        absences.append(_absence(each, found) or ("opsmith has no built kernels" if each == own else ""))
    try:
        return loadable(compile_runtime, _EXPORTED)
    except errors.ToolchainError as error:
        if not kernel:
            raise
        raise _missing(kernel, "; ".join(filter(None, absences)), error) from None


def _absence(package: Path | None, found: Found) -> str:
    """Return why a package's built kernels have no runtime for this opsmith; empty if it has no kernels."""
    if found.folder is None:
        return found.reason
    built = [file for file in found.folder.files if file.language == LANGUAGE]
    if not built:
        return f"{found.folder.directory} does not have this library"
    if all(file.digest != runtime_digest() for file in built):
        return (
            f"this opsmith cannot use the library in {package}, which was built with opsmith "
            f"{found.folder.opsmith}"
        )
    return found.reason


def _missing(kernel: str, reason: str, error: errors.ToolchainError) -> errors.ToolchainError:
    """Return the error for an existing kernel that cannot run without the runtime."""
    return errors.ToolchainError(
        "the library between torch and all kernels is missing",
        expected="this library, built into opsmith or into the package of the kernel, or a C++ compiler",
        got=f"the kernel fits, and is {kernel}; {reason}; the library cannot be compiled: {error.problem}: "
        f"{error.got}",
        hint="install a wheel of this opsmith with built kernels, or rebuild the package with this opsmith",
    )


def compile_runtime() -> CacheEntry:
    """Compile the library between torch and all kernels, once on a machine.

    Raises:
        ToolchainError: See `compile_kernel`.
    """
    toolchain = kernel_toolchain()

    def build(directory: Path) -> None:
        (directory / "empty.cpp").write_text("")
        for path in (HEADER, RUNTIME, *RUNTIME_HEADERS):
            (directory / path.name).write_bytes(path.read_bytes())
        flags = ["-std=c++17", "-fPIC", "-shared"]
        for arguments in (
            [*flags, f"-Wl,-soname,{STUB}", "empty.cpp", "-o", STUB],
            [*flags, "-O2", "-fvisibility=hidden", "-Wl,--no-as-needed", RUNTIME.name, STUB, "-o", LIBRARY],
        ):
            expected = "a compiler of C++17, such as g++ 9 or clang 10"
            toolchain.build("opsmith's own library", arguments, directory, expected)

    parts = {"kind": "runtime", "text": runtime_text(), **build_parts(toolchain, FLAGS)}
    return cache_on_disk().obtain(parts, build)


def runtime_text() -> str:
    """Return the source of the library between torch and all kernels."""
    return "".join(path.read_text(encoding="utf-8") for path in (RUNTIME, *RUNTIME_HEADERS))


def runtime_digest() -> str:
    """Return the digest of the runtime's source, which identifies its built file in a package."""
    return digest_of_parts({"text": runtime_text(), "header": HEADER.read_text(encoding="utf-8")})


def fill_new_memory(on: bool) -> bool:
    """Fill results of C++ kernels with nan before the kernel writes them, or stop doing this.

    Torch's `fill_uninitialized_memory` does not affect these results, since torch's C functions do not fill
    memory. The setting also applies to kernels that are loaded later.

    Returns:
        The previous setting.
    """
    global _fills_memory
    before, _fills_memory = _fills_memory, on
    if runtime.cache_info().currsize:
        runtime().opsmith_fill(int(on))
    return before


@cache
def runtime() -> Any:
    """Load the runtime's functions that are called without the GIL; torch's dispatcher has its own lock."""
    loaded = _with_prototypes(ctypes.CDLL(runtime_file().path))
    loaded.opsmith_fill(int(_fills_memory))
    return loaded


@cache
def python_runtime() -> Any:
    """Load the runtime's functions that use Python objects and are called with the GIL."""
    return _with_prototypes(ctypes.PyDLL(runtime_file().path))


def _with_prototypes(library: Any) -> Any:
    pointer, number, numbers = ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64)
    text = ctypes.c_char_p
    for name, result, arguments in (
        ("most_entries", number, []),
        ("entry", pointer, [number, ctypes.c_uint64, text]),
        ("record", pointer, [numbers, number, ctypes.py_object]),
        ("register", pointer, [pointer, number, text, text, text]),
        ("deregister", None, [pointer]),
        ("publish", None, [pointer, pointer]),
        ("withdraw", None, [pointer, pointer]),
        ("driver", pointer, [ctypes.POINTER(pointer)]),
        ("pending_record", pointer, []),
        ("pending", pointer, [pointer]),
        ("remember", None, [pointer, pointer, numbers, numbers]),
        ("forget", None, [pointer]),
        ("forget_copies", None, [pointer]),
        ("cached_plans", ctypes.c_int64, [pointer]),
        ("copies", ctypes.c_int64, [pointer, number]),
        ("hold", None, [ctypes.py_object, text]),
        ("fill", None, [number]),
        ("version", ctypes.c_int64, []),
    ):
        function = getattr(library, f"opsmith_{name}")
        function.restype, function.argtypes = result, arguments
    return library
