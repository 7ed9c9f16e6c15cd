"""Loaded library of a C++ kernel, and its registration with torch's dispatcher."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cache import CacheEntry, cache_on_disk
from opsmith.core.argument_types import NUMBERED
from opsmith.kernels.common.parameters import PARAMETER_TYPES, Parameter
from opsmith.kernels.common.result_layout import LAYOUTS
from opsmith.kernels.cpp.compiler import LIBRARY, compile_runtime

VERSION = 3
"""Version of the structures that a library exports; a test compares it with the header's."""
NAMESPACE = "opsmith_kernels"
OWN, SERVED = 0, 1
"""Operators for which a library is registered: one of its own, and the one that it computes."""
_OPTIONAL = 100

_numbers = itertools.count()

_fills_memory = False
"""Setting of `fill_new_memory`."""
_retired: list[Any] = []
"""Operators that are no longer called. They stay alive: a call in another thread may be about to use one, and
torch crashes in an operator that was deleted."""


class _Parameter(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("type", "optional", "written", "dtype", "dim", "layout")]


class _Candidate(ctypes.Structure):
    _fields_ = [
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_int32),
        ("run", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
    ]


class _Exported(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("candidates", ctypes.POINTER(_Candidate)),
        ("entries", ctypes.c_void_p * 2),
        ("run", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
    ]


class CppLibrary:
    """Loaded library of a kernel.

    Args:
        obtain: Returns the entry of the library; see `compile_kernel`.

    Attributes:
        candidates: Parameters of each instance of the kernel.
        computes_sizes: True if it computes the sizes of the results.
    """

    def __init__(self, obtain: Callable[[], CacheEntry]) -> None:
        self._library = ctypes.CDLL(_loadable(obtain))
        self.exported = _Exported.in_dll(self._library, "opsmith_kernel")
        self.computes_sizes = bool(self.exported.candidates[0].sizes)
        self.candidates = tuple(
            tuple(map(_decode, each.parameters[: each.count]))
            for each in self.exported.candidates[: self.exported.count]
        )


def _loadable(obtain: Callable[[], CacheEntry]) -> str:
    """Return the path of an entry's library; one from the cache that does not load is built again once.

    Args:
        obtain: Returns the entry.

    Raises:
        CompileError: If a library that was built now does not load.
    """
    entry = obtain()
    path = str(entry.directory / LIBRARY)
    try:
        ctypes.CDLL(path)
    except OSError as error:
        if entry.source in ("disk", "built") and _runs_nothing(entry.directory):
            cache_on_disk().abandon("no program can be run from its file system (noexec)")
            return _loadable(obtain)
        if entry.source == "disk":
            cache_on_disk().discard(entry)
            return _loadable(obtain)
        raise errors.CompileError(
            "the compiled kernel cannot be loaded",
            got=str(error),
            hint="see that every library it needs is installed, and that CXX is this machine's compiler",
        ) from error
    return path


def _runs_nothing(directory: Path) -> bool:
    """Return True for a file system that is mounted without the right to run programs from it."""
    return hasattr(os, "statvfs") and bool(os.statvfs(directory).f_flag & os.ST_NOEXEC)


def _decode(raw: Any) -> Parameter:
    return Parameter(
        PARAMETER_TYPES[raw.type],
        bool(raw.optional),
        bool(raw.written),
        None if raw.dtype < 0 else NUMBERED["ScalarType"][raw.dtype],
        None if raw.dim < 0 else raw.dim,
        LAYOUTS[raw.layout],
    )


class DispatchedKernel:
    """Library that is registered for an operator of its own, with the reference's schema.

    Args:
        library: The kernel.
        schema: Text of the operator's schema, without its name.
        arguments: Parameter for each argument.
        results: Number of results.
        fallback: Computes calls without a plan, in Python.
        failed: Makes an exception from the text that the kernel threw.

    Attributes:
        overload: The operator.
        candidates: Parameters of each instance of the kernel.
        computes_sizes: True if it computes the sizes of the results.

    Raises:
        ToolchainError: If torch refuses the kernel.
    """

    def __init__(
        self,
        library: CppLibrary,
        schema: str,
        arguments: Sequence[Parameter],
        results: int,
        fallback: Callable[..., Any],
        failed: Callable[[str], Exception],
    ) -> None:
        self._library, self._schema, self._results = library, schema, results
        self.candidates, self.computes_sizes = library.candidates, library.computes_sizes
        types = [PARAMETER_TYPES.index(each.type) + _OPTIONAL * each.optional for each in arguments]
        self._record = _python_runtime().opsmith_take(
            ctypes.byref(library.exported),
            (ctypes.c_int32 * len(types))(*types),
            len(types),
            results,
            ctypes.py_object(failed),
            _torch_version(),
        )
        self._defined: dict[int, list[Any]] = {OWN: [], SERVED: []}
        self._remembers = True
        name = f"kernel_{next(_numbers)}"
        # It runs below autograd: the operator that calls it records gradients.
        self._define(OWN, name)
        self._register(OWN, NAMESPACE, name, fallback)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def serve(self, name: str, fallback: Callable[..., Any]) -> None:
        """Take the calls of an operator on the CPU, `namespace::name` with the same schema.

        Args:
            name: Name of the operator.
            fallback: Computes calls without a plan, in Python.
        """
        namespace, _, short = name.partition("::")
        self._register(SERVED, namespace, short, fallback)

    def withdraw(self) -> None:
        """Take no calls of the operator any more."""
        self._remove(SERVED)

    def remove(self) -> None:
        """Take no calls any more; calls under way end normally."""
        self._remembers = False
        self._remove(SERVED)
        _retired.extend(self._defined[OWN])

    def pending(self) -> int | None:
        """Return the signature of the call that is in the fallback in this thread, for one `remember`."""
        signature: int | None = _runtime().opsmith_pending(self._record)
        return signature

    def remember(self, signature: int, plan: Sequence[int] | None) -> None:
        """Run calls of this signature by an encoded plan from now on; without one, by the fallback."""
        packed = None
        if plan is not None and self._remembers:
            packed = (ctypes.c_int64 * len(plan))(*plan)
        _runtime().opsmith_remember(self._record, signature, packed)

    def forget(self) -> None:
        """Drop all plans."""
        _runtime().opsmith_forget(self._record)

    @property
    def cached_plans(self) -> int:
        """Number of call signatures with a plan."""
        count: int = _runtime().opsmith_cached_plans(self._record)
        return count

    def copies(self, argument: int) -> int:
        """Return the number of copies of an argument for its layout; results come after the last argument."""
        count: int = _runtime().opsmith_copies(self._record, argument)
        return count

    def _define(self, entry: int, name: str) -> None:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(f"{name}{self._schema}")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        self._defined[entry].append(library)

    def _register(self, entry: int, namespace: str, name: str, fallback: Callable[..., Any]) -> None:
        fallback_name = f"fallback_{next(_numbers)}"
        self._define(entry, fallback_name)
        held = _holding_errors(fallback, self._results)
        self._defined[entry][-1].impl(fallback_name, held, "CompositeExplicitAutograd")
        if not _runtime().opsmith_register(
            self._record, entry, namespace.encode(), name.encode(), f"{NAMESPACE}::{fallback_name}".encode()
        ):
            raise errors.ToolchainError(
                "torch does not take the kernel",
                expected="a torch whose dispatcher takes kernels from C",
                got=f"torch {torch.__version__}",
                hint="give the kernel in Python on this torch",
            )

    def _remove(self, entry: int) -> None:
        _runtime().opsmith_unregister(self._record, entry)
        _retired.extend(self._defined[entry])
        self._defined[entry] = []


def _holding_errors(fallback: Callable[..., Any], results: int) -> Callable[..., Any]:
    """Wrap a function so that the runtime raises its exceptions, which cannot pass through C functions."""

    def held(*args: Any, **kwargs: Any) -> Any:
        try:
            return fallback(*args, **kwargs)
        except BaseException as error:
            _python_runtime().opsmith_hold(ctypes.py_object(error), str(error).encode())
            placeholders = [torch.empty(0) for _ in range(results)]
            return placeholders[0] if results == 1 else tuple(placeholders)

    return held


def fill_new_memory(on: bool) -> bool:
    """Set whether results of C++ kernels are filled with nan before the kernel writes them.

    Torch's `fill_uninitialized_memory` does not affect them: its C functions leave memory as it is. The
    setting also holds for kernels that are loaded later.

    Returns:
        The previous setting.
    """
    global _fills_memory
    before, _fills_memory = _fills_memory, on
    if _runtime.cache_info().currsize:
        _runtime().opsmith_fill(int(on))
    return before


@cache
def _runtime_path() -> str:
    return _loadable(compile_runtime)


@cache
def _runtime() -> Any:
    """Load the runtime's functions, called without the interpreter's lock: torch's dispatcher has its own."""
    loaded = _with_prototypes(ctypes.CDLL(_runtime_path()))
    loaded.opsmith_fill(int(_fills_memory))
    return loaded


@cache
def _python_runtime() -> Any:
    """Load the runtime's functions that hold Python objects, called with the lock."""
    return _with_prototypes(ctypes.PyDLL(_runtime_path()))


def _with_prototypes(library: Any) -> Any:
    pointer, number, numbers = ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)
    for name, result, arguments in (
        ("take", pointer, [pointer, numbers, number, number, ctypes.py_object, ctypes.c_uint64]),
        ("register", number, [pointer, number, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p]),
        ("unregister", None, [pointer, number]),
        ("pending", pointer, [pointer]),
        ("remember", None, [pointer, pointer, ctypes.POINTER(ctypes.c_int64)]),
        ("forget", None, [pointer]),
        ("cached_plans", ctypes.c_int64, [pointer]),
        ("copies", ctypes.c_int64, [pointer, number]),
        ("hold", None, [ctypes.py_object, ctypes.c_char_p]),
        ("fill", None, [number]),
        ("version", ctypes.c_int64, []),
    ):
        function = getattr(library, f"opsmith_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _torch_version() -> int:
    """Return torch's version as its C functions take it: a byte each for major, minor and patch."""
    major, minor, patch = (int(part) for part in torch.__version__.split("+")[0].split(".")[:3])
    return major << 56 | minor << 48 | patch << 40
