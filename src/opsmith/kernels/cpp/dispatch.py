"""Loaded library of a C++ kernel, and its registration with torch's dispatcher."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from opsmith import errors
from opsmith.core.forked_locks import lock_of
from opsmith.kernels.common.parameters import PARAMETER_TYPES, Parameter
from opsmith.kernels.cpp.library import CppLibrary
from opsmith.kernels.cpp.runtime import python_runtime, runtime

NAMESPACE = "opsmith_kernels"
OWN, SERVED = 0, 1
"""Entries of a library: an operator of its own, and the one that it computes."""
_OPTIONAL, _WRITTEN = 100, 1000

_numbers = itertools.count()
_lock = lock_of(sys.modules[__name__], "_lock")


class DispatchedKernel:
    """Library that is registered for an operator of its own, with the reference's schema.

    It stays registered: a call in another thread may be about to use it, and torch crashes in an operator
    that was deleted. `dispatched_kernel` returns the same one for a library that was loaded before.

    Args:
        library: The kernel.
        operator: Name of the operator that it computes.
        schema: Text of the operator's schema, without its name.
        arguments: Parameter for each argument.
        results: Number of results.

    Attributes:
        overload: The operator of its own.
        candidates: Parameters of each instance of the kernel.
        computes_sizes: True if it computes the sizes of the results.
        fallback: Computes calls without a plan, in Python.
        failed: Makes an exception from the text that the kernel threw.

    Raises:
        ToolchainError: If torch refuses the kernel.
    """

    fallback: Callable[..., Any]
    failed: Callable[[str], Exception]

    def __init__(
        self, library: CppLibrary, operator: str, schema: str, arguments: Sequence[Parameter], results: int
    ) -> None:
        self.candidates, self.computes_sizes = library.candidates, library.computes_sizes
        self._operator, self._served_fallback = operator, _fallback(schema, results, operator)
        types = [
            PARAMETER_TYPES.index(each.type) + _OPTIONAL * each.optional + _WRITTEN * each.written
            for each in arguments
        ]
        self.record: int = python_runtime().opsmith_take(
            ctypes.byref(library.exported),
            (ctypes.c_int32 * len(types))(*types),
            len(types),
            results,
            ctypes.py_object(self._make_error),
            _torch_version(),
            _fallback(schema, results).name.encode(),
            self._served_fallback.name.encode(),
        )
        self.publish()
        name = f"kernel_{next(_numbers)}"
        # It runs below autograd: the operator that calls it records gradients.
        _define(name, schema)
        self._register(OWN, NAMESPACE, name)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def publish(self) -> None:
        """Make calls of the library use this schema."""
        runtime().opsmith_publish(self.record)

    def serve(self, fallback: Callable[..., Any]) -> Callable[[], None] | None:
        """Take the calls of its operator on the CPU.

        Args:
            fallback: Computes calls without a plan, in Python.

        Returns:
            Function that ends the registration, if this call has made it. No other thread may call the
            operator then.
        """
        with _lock:
            self._served_fallback.function = fallback
            entered = _served.get(self._operator)
            runtime().opsmith_serve((entered or self).record, self.record)
            if entered is not None:
                return None
            namespace, _, name = self._operator.partition("::")
            _served[self._operator] = self  # first: `withdraw` must find it after an interrupt
            try:
                registered = self._register(SERVED, namespace, name)
            except Exception:
                del _served[self._operator]
                raise

        def deregister() -> None:
            with _lock:
                del _served[self._operator]
            runtime().opsmith_deregister(registered)

        return deregister

    def withdraw(self) -> None:
        """Take no calls of the operator any more, and drop all plans."""
        with _lock:
            entered = _served.get(self._operator)
            if entered is not None:
                runtime().opsmith_withdraw(entered.record, self.record)
        runtime().opsmith_forget(self.record)

    def release(self) -> None:
        """Forget all that calls have left here. Calls under way end normally, others go to the fallback."""
        self.withdraw()
        runtime().opsmith_forget_copies(self.record)

    def pending(self) -> int | None:
        """Return the signature of the call that is in the fallback in this thread, for one `remember`."""
        signature: int | None = runtime().opsmith_pending(self.record)
        return signature

    def remember(self, signature: int, plan: Sequence[int] | None) -> None:
        """Run calls of this signature by an encoded plan from now on; without one, by the fallback."""
        packed = None if plan is None else (ctypes.c_int64 * len(plan))(*plan)
        runtime().opsmith_remember(self.record, signature, packed)

    @property
    def cached_plans(self) -> int:
        """Number of call signatures with a plan."""
        count: int = runtime().opsmith_cached_plans(self.record)
        return count

    def copies(self, argument: int) -> int:
        """Return the number of copies of an argument for its layout; results come after the last argument."""
        count: int = runtime().opsmith_copies(self.record, argument)
        return count

    def _register(self, entry: int, namespace: str, name: str) -> int:
        registered: int | None = runtime().opsmith_register(
            self.record, entry, namespace.encode(), name.encode()
        )
        if registered is None:
            raise errors.ToolchainError(
                "torch does not take the kernel",
                expected="a torch whose dispatcher takes kernels from C",
                got=f"torch {torch.__version__}",
                hint="give the kernel in Python on this torch",
            )
        return registered

    def _make_error(self, text: str) -> Exception:
        return self.failed(text)


_kernels: dict[tuple[int, str], DispatchedKernel] = {}
"""Kernel by the address of its library's exports and by its schema."""
_by_record: dict[int, DispatchedKernel] = {}
_served: dict[str, DispatchedKernel] = {}
"""Kernel by whose library calls of an operator come in, by the operator's name."""


def dispatched_kernel(
    library: CppLibrary,
    operator: str,
    schema: str,
    arguments: Sequence[Parameter],
    results: int,
    fallback: Callable[..., Any],
    failed: Callable[[str], Exception],
) -> DispatchedKernel:
    """Return the kernel of a library, registered now or before.

    A library is registered once. The system loads a file once, and its entries could not tell two apart.

    Args:
        library: The kernel.
        operator: Name of the operator that it computes.
        schema: Text of the operator's schema, without its name.
        arguments: Parameter for each argument.
        results: Number of results.
        fallback: Computes calls without a plan, in Python.
        failed: Makes an exception from the text that the kernel threw.

    Raises:
        ToolchainError: If torch refuses the kernel.
    """
    key = ctypes.addressof(library.exported), schema
    with _lock:
        kernel = _kernels.get(key)
        if kernel is None:
            kernel = DispatchedKernel(library, operator, schema, arguments, results)
            _by_record[kernel.record] = kernel
            _kernels[key] = kernel  # last: an interrupt may come before
        kernel.release()
        kernel.fallback, kernel.failed = fallback, failed
        kernel.publish()
    return kernel


class _Fallback:
    """Operator in Python for calls without a plan, of all operators with a schema, or of one.

    Args:
        schema: Text of the schema, without a name.
        results: Number of results.

    Attributes:
        name: Name of the operator.
        function: The function that it calls.
    """

    def __init__(self, schema: str, results: int) -> None:
        name = f"fallback_{next(_numbers)}"
        self.name = f"{NAMESPACE}::{name}"
        self.function = _without_plan
        _define(name, schema)
        _library().impl(
            name,
            _holding_errors(lambda *a, **k: self.function(*a, **k), results),
            "CompositeExplicitAutograd",
        )


@cache
def _fallback(schema: str, results: int, operator: str = "") -> _Fallback:
    """Return the fallback of the libraries' own operators, or of `operator`."""
    return _Fallback(schema, results)


def _without_plan(*args: Any, **kwargs: Any) -> Any:
    """Compute a call of a library's own operator that has no plan."""
    return _by_record[runtime().opsmith_pending_record()].fallback(*args, **kwargs)


@cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def _define(name: str, schema: str) -> None:
    _library().define(f"{name}{schema}")
    _library().impl(name, torch.library.fallthrough_kernel, "Autograd")


def _holding_errors(fallback: Callable[..., Any], results: int) -> Callable[..., Any]:
    """Wrap a function so that the runtime raises its exceptions, which cannot pass through C functions."""

    def held(*args: Any, **kwargs: Any) -> Any:
        try:
            return fallback(*args, **kwargs)
        except BaseException as error:
            python_runtime().opsmith_hold(ctypes.py_object(error), _text(error))
            placeholders = [torch.empty(0) for _ in range(results)]
            return (placeholders[0] if results == 1 else tuple(placeholders)) if results else None

    return held


def _text(error: BaseException) -> bytes:
    """Return the text of an exception for callers that are not Python; its class if it has no text."""
    try:
        return str(error).encode(errors="replace")
    except Exception:  # of its own `__str__`
        return type(error).__qualname__.encode(errors="replace")


def _torch_version() -> int:
    """Return torch's version as its C functions take it: a byte each for major, minor and patch."""
    major, minor, patch = (int(part) for part in torch.__version__.split("+")[0].split(".")[:3])
    return major << 56 | minor << 48 | patch << 40
