"""A loaded C++ kernel as torch's dispatcher runs it, and what it remembers of the calls that it met."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cpp.compiling import LIBRARY, runtime
from opsmith.build.cpp.library import CppLibrary
from opsmith.build.cpp.plan import Plan
from opsmith.build.parameter import FORMS, Parameter

NAMESPACE = "opsmith_kernels"
OWN, SERVED = 0, 1
"""The two operators for which a library is registered: one of its own, and the one whose kernel it is."""
_OPTIONAL = 100

_numbers = itertools.count()

_filling = False
"""Whether results hold nan before a kernel writes them."""
_retired: list[Any] = []
"""Operators that are called no more. They stay: a call in another thread may be about to use one, and torch
crashes in an operator that is gone."""


class DispatchedKernel:
    """A library, registered for an operator of its own, which takes and returns what the reference does.

    Args:
        library: The kernel.
        schema: Text of the operator's schema, without its name.
        arguments: What each argument is in C++.
        results: How many results there are.
        aside: Computes, in Python, calls of a form that is not remembered.
        failed: Makes an exception from what the kernel threw.

    Attributes:
        overload: The operator.

    Raises:
        ToolchainError: If torch does not take the kernel.
    """

    def __init__(
        self,
        library: CppLibrary,
        schema: str,
        arguments: Sequence[Parameter],
        results: int,
        aside: Callable[..., Any],
        failed: Callable[[str], Exception],
    ) -> None:
        self._library, self._schema, self._results = library, schema, results
        forms = [FORMS.index(each.form) + _OPTIONAL * each.optional for each in arguments]
        self._record = _python().opsmith_take(
            ctypes.byref(library.exported),
            (ctypes.c_int32 * len(forms))(*forms),
            len(forms),
            results,
            ctypes.py_object(failed),
            _torch_version(),
        )
        self._defined: dict[int, list[Any]] = {OWN: [], SERVED: []}
        self._remembers = True
        name = f"kernel_{next(_numbers)}"
        # It runs below autograd, on tensors whose gradients are somebody else's concern.
        self._define(OWN, name)
        self._register(OWN, NAMESPACE, name, aside)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def serve(self, name: str, aside: Callable[..., Any]) -> None:
        """Take the calls of an operator on the CPU, `namespace::name` of the same schema.

        Args:
            name: Its name.
            aside: Computes, in Python, calls of a form that is not remembered.
        """
        namespace, _, short = name.partition("::")
        self._register(SERVED, namespace, short, aside)

    def withdraw(self) -> None:
        """Take no calls of the operator any more."""
        self._remove(SERVED)

    def remove(self) -> None:
        """Take no calls any more; those that are under way end as they began."""
        self._remembers = False
        self._remove(SERVED)
        _retired.extend(self._defined[OWN])

    def pending(self) -> int | None:
        """The form of the call that has just gone aside in this thread, to be given to `remember` once."""
        form: int | None = _runtime().opsmith_pending(self._record)
        return form

    def remember(self, form: int, plan: Plan | None) -> None:
        """Run calls of this form by this plan from now on; without one, go aside again."""
        numbers = plan.numbers() if plan is not None and self._remembers else None
        packed = None if numbers is None else (ctypes.c_int64 * len(numbers))(*numbers)
        _runtime().opsmith_remember(self._record, form, packed)

    def forget(self) -> None:
        """Forget every plan."""
        _runtime().opsmith_forget(self._record)

    @property
    def remembered(self) -> int:
        """How many forms have a plan."""
        count: int = _runtime().opsmith_remembered(self._record)
        return count

    def copies(self, argument: int) -> int:
        """How often an argument was copied for its layout; that after the last argument are the results."""
        count: int = _runtime().opsmith_copies(self._record, argument)
        return count

    def _define(self, entry: int, name: str) -> None:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(f"{name}{self._schema}")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        self._defined[entry].append(library)

    def _register(self, entry: int, namespace: str, name: str, aside: Callable[..., Any]) -> None:
        beside = f"aside_{next(_numbers)}"
        self._define(entry, beside)
        self._defined[entry][-1].impl(beside, _held(aside, self._results), "CompositeExplicitAutograd")
        if not _runtime().opsmith_register(
            self._record, entry, namespace.encode(), name.encode(), f"{NAMESPACE}::{beside}".encode()
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


def _held(aside: Callable[..., Any], results: int) -> Callable[..., Any]:
    """A function whose exceptions the runtime raises, for the C functions between cannot."""

    def held(*args: Any, **kwargs: Any) -> Any:
        try:
            return aside(*args, **kwargs)
        except BaseException as error:
            _python().opsmith_hold(ctypes.py_object(error), str(error).encode())
            nothing = [torch.empty(0) for _ in range(results)]
            return nothing[0] if results == 1 else tuple(nothing)

    return held


def _declared(library: Any) -> Any:
    pointer, number, numbers = ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)
    for name, result, arguments in (
        ("take", pointer, [pointer, numbers, number, number, ctypes.py_object, ctypes.c_uint64]),
        ("register", number, [pointer, number, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p]),
        ("unregister", None, [pointer, number]),
        ("pending", pointer, [pointer]),
        ("remember", None, [pointer, pointer, ctypes.POINTER(ctypes.c_int64)]),
        ("forget", None, [pointer]),
        ("remembered", ctypes.c_int64, [pointer]),
        ("copies", ctypes.c_int64, [pointer, number]),
        ("hold", None, [ctypes.py_object, ctypes.c_char_p]),
        ("fill", None, [number]),
        ("version", ctypes.c_int64, []),
    ):
        function = getattr(library, f"opsmith_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@cache
def _runtime() -> Any:
    """The runtime's functions, called without the interpreter's lock: torch's dispatcher has its own."""
    loaded = _declared(ctypes.CDLL(str(runtime().directory / LIBRARY)))
    loaded.opsmith_fill(int(_filling))
    return loaded


def fill_new_memory(on: bool) -> bool:
    """Say whether results of C++ kernels hold nan before the kernel writes them; returns what was so.

    Torch's own `fill_uninitialized_memory` does not reach them: its C functions leave memory as it is. What
    is said here holds for kernels that are loaded later, too.
    """
    global _filling
    before, _filling = _filling, on
    if _runtime.cache_info().currsize:
        _runtime().opsmith_fill(int(on))
    return before


@cache
def _python() -> Any:
    """Those that hold objects of Python, called with the lock."""
    return _declared(ctypes.PyDLL(str(runtime().directory / LIBRARY)))


def _torch_version() -> int:
    """Torch's version as its C functions take it: a byte each for major, minor and patch, from the top."""
    major, minor, patch = (int(part) for part in torch.__version__.split("+")[0].split(".")[:3])
    return major << 56 | minor << 48 | patch << 40
