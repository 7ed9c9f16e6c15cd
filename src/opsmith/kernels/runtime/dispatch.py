"""Kernels that torch's dispatcher calls without Python, through entries of the runtime."""

from __future__ import annotations

import ctypes
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from opsmith import errors
from opsmith.core.forked_locks import lock_of
from opsmith.kernels.common.parameters import Parameter
from opsmith.kernels.runtime.library import python_runtime, runtime
from opsmith.kernels.runtime.plan import Plan, counted_all

NAMESPACE = "opsmith_kernels"

_numbers = itertools.count()
_lock = lock_of(sys.modules[__name__], "_lock")


class _Entry:
    """Entry of the runtime for the calls of one operator.

    Args:
        results: Number of results.
        fallback: Operator for calls without a plan.

    Attributes:
        address: The entry.
        fallback: The operator for calls without a plan.
    """

    def __init__(self, results: int, fallback: _Fallback) -> None:
        self.fallback = fallback
        self.address: int = runtime().opsmith_entry(results, _torch_version(), fallback.name.encode())

    def register(self, namespace: str, name: str, device: str) -> Callable[[], None]:
        """Register this entry for the calls of an operator on a device.

        Returns:
            Function that ends the registration. No other thread may call the operator meanwhile.

        Raises:
            ToolchainError: If torch refuses the kernel, or no entry is free.
        """
        number = _take_number()
        registered: int | None = runtime().opsmith_register(
            self.address, number, namespace.encode(), device.encode(), name.encode()
        )
        if registered is None:
            _free.append(number)
            raise errors.ToolchainError(
                "torch does not accept the kernel",
                expected="a torch whose dispatcher accepts kernels from C",
                got=f"torch {torch.__version__}",
                hint="write the kernel in Python for this torch",
            )

        def deregister() -> None:
            runtime().opsmith_deregister(registered)
            _free.append(number)

        return deregister


class DispatchedKernel:
    """Place of a kernel in the dispatcher: its plans, and a private operator that only runs the kernel.

    The place stays as long as the process, since a call in another thread may be about to use it, but it does
    not keep the kernel alive. After the kernel is gone, another kernel of its operator may take the place.

    Args:
        operator: Name of the operator that the kernel computes.
        schema: Text of the operator's schema, without its name.
        signature: The arguments as numbers, in the format of the runtime.
        results: Number of results.
        device: Dispatch key of the device, such as `CPU`.

    Attributes:
        overload: The kernel's private operator.
        library: Object from which the kernel was loaded, for use by the kernel.

    Raises:
        ToolchainError: If torch refuses the kernel, or no entry is free.
    """

    library: Any = None
    _owner: weakref.ref[object]
    _without_plan: weakref.WeakMethod[Callable[..., Any]]
    _failed: weakref.WeakMethod[Callable[[str], Exception]]

    def __init__(
        self, operator: str, schema: str, signature: Sequence[int], results: int, device: str
    ) -> None:
        self._operator, self._schema, self._results, self._device = operator, schema, results, device
        entry, name = _Entry(results, _fallback(schema, results)), f"kernel_{next(_numbers)}"
        _define(name, schema)
        entry.register(NAMESPACE, name, "CompositeExplicitAutograd")  # its caller has chosen the kernel
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        self._record: int = python_runtime().opsmith_record(
            _packed(signature), results, ctypes.py_object(self._make_error)
        )
        _by_record[self._record] = self
        runtime().opsmith_publish(entry.address, self._record)

    @property
    def owner(self) -> object | None:
        """The kernel; None after it is gone."""
        return self._owner()

    def take(
        self, owner: object, without_plan: Callable[..., Any], failed: Callable[[str], Exception]
    ) -> None:
        """Give the place to a kernel; see `dispatched_kernel` for the arguments."""
        self.release()
        self._owner = weakref.ref(owner)
        self._without_plan, self._failed = weakref.WeakMethod(without_plan), weakref.WeakMethod(failed)

    def serve(self, fallback: Callable[..., Any]) -> Callable[[], None] | None:
        """Take over the calls of its operator on its device.

        Args:
            fallback: Python function that computes calls without a plan.

        Returns:
            Function that ends the registration, if this call made it. No other thread may call the operator
            meanwhile.
        """
        key = self._operator, self._device
        with _lock:
            entry = _served.get(key)
            if entry is not None:
                entry.fallback.function = fallback
                runtime().opsmith_publish(entry.address, self._record)
                return None
            served = _fallback(self._schema, self._results, self._operator)
            served.function = fallback
            entry = _Entry(self._results, served)
            runtime().opsmith_publish(entry.address, self._record)
            namespace, _, name = self._operator.partition("::")
            _served[key] = entry  # before the registration: `withdraw` must find it after an interrupt
            try:
                end = entry.register(namespace, name, self._device)
            except Exception:
                del _served[key]
                raise

        def deregister() -> None:
            with _lock:
                del _served[key]
                end()

        return deregister

    def withdraw(self) -> None:
        """Stop taking calls of the operator, and drop all plans."""
        with _lock:
            entry = _served.get((self._operator, self._device))
            if entry is not None:
                runtime().opsmith_withdraw(entry.address, self._record)
        runtime().opsmith_forget(self._record)

    def release(self) -> None:
        """Forget the data of earlier calls. Running calls end normally, and new calls go to the fallback."""
        self.withdraw()
        runtime().opsmith_forget_copies(self._record)

    def pending(self) -> int | None:
        """Return the signature of this thread's call in the fallback; pass it to `remember` once."""
        signature: int | None = runtime().opsmith_pending(self._record)
        return signature

    def remember(self, signature: int, plan: Plan | None) -> None:
        """Run calls of this signature by a plan from now on, and calls of its kind by its recipe."""
        recipe = None if plan is None else plan.recipe
        packed = [None if each is None else _packed(each.encode()) for each in (plan, recipe)]
        runtime().opsmith_remember(self._record, signature, *packed)

    @property
    def cached_plans(self) -> int:
        """Number of call signatures with a plan."""
        count: int = runtime().opsmith_cached_plans(self._record)
        return count

    def copies(self, argument: int) -> int:
        """Return how often an argument was copied into another layout; results follow the last argument."""
        count: int = runtime().opsmith_copies(self._record, argument)
        return count

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call of the kernel's private operator that has no plan."""
        without_plan = self._without_plan()
        if without_plan is None:  # a running call of a kernel that is gone
            namespace, _, name = self._operator.partition("::")
            return getattr(getattr(torch.ops, namespace), name)(*args, **kwargs)
        return without_plan(*args, **kwargs)

    def _make_error(self, text: str) -> Exception:
        failed = self._failed()
        return failed(text) if failed else errors.KernelError(text, operator=self._operator)


_by_record: dict[int, DispatchedKernel] = {}
_places: dict[tuple[Any, ...], list[DispatchedKernel]] = {}
"""Places of kernels, by operator, its arguments, and device."""
_served: dict[tuple[str, str], _Entry] = {}
"""Entry that gets the calls of an operator on a device."""
_free: list[int] = []
"""Numbers of entries that are free again."""
_used = itertools.count()


def _packed(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _take_number() -> int:
    """Return the number of a free entry."""
    number = _free.pop() if _free else next(_used)
    if number < (most := runtime().opsmith_most_entries()):
        return number
    raise errors.ToolchainError(
        "no entry is free for another kernel that is called without Python",
        expected=f"at most {most} entries in one process: one for each kernel, and one for each operator",
        got=f"{most}, all in use",
        hint="use fewer kernels in one process; until then the reference computes the operator",
    )


def dispatched_kernel(
    owner: object,
    operator: str,
    schema: str,
    arguments: Sequence[Parameter],
    free: Sequence[bool],
    by_address: bool,
    results: int,
    device: str,
    without_plan: Callable[..., Any],
    failed: Callable[[str], Exception],
) -> DispatchedKernel:
    """Return a kernel's place in the dispatcher: its earlier place, a place that is free again, or a new one.

    Args:
        owner: The kernel.
        operator: Name of the operator that the kernel computes.
        schema: Text of the operator's schema, without its name.
        arguments: Parameter for each argument.
        free: For each argument, True if a call's signature omits its floating-point numbers.
        by_address: True if a call's signature contains whether each tensor's address is divisible by 16.
        results: Number of results.
        device: Dispatch key of the device, such as `CPU`.
        without_plan: Python method of the kernel that computes calls without a plan.
        failed: Method of the kernel that makes an exception from the text of a C++ exception.

    Raises:
        ToolchainError: If torch refuses the kernel, or no entry is free.
    """
    signature = counted_all(
        [*each.numbers()[:3], is_free, by_address and each.type == "Tensor"]
        for each, is_free in zip(arguments, free, strict=True)
    )
    with _lock:
        places = _places.setdefault((operator, schema, *signature, device), [])
        by_owner = {id(each.owner): each for each in places}
        place = by_owner.get(id(owner)) or by_owner.get(id(None))
        if place is None:
            place = DispatchedKernel(operator, schema, signature, results, device)
            places.append(place)
        place.take(owner, without_plan, failed)
    return place


class _Fallback:
    """Operator in Python for calls without a plan, for all operators with a schema or for one operator.

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
    """Return the fallback of the kernels' private operators, or of `operator`."""
    return _Fallback(schema, results)


def _without_plan(*args: Any, **kwargs: Any) -> Any:
    """Compute a call of a kernel's private operator that has no plan."""
    return _by_record[runtime().opsmith_pending_record()].compute(*args, **kwargs)


@cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def _define(name: str, schema: str) -> None:
    _library().define(f"{name}{schema}")
    _library().impl(name, torch.library.fallthrough_kernel, "Autograd")


def _holding_errors(fallback: Callable[..., Any], results: int) -> Callable[..., Any]:
    """Wrap a function so that the runtime re-raises its exceptions, which cannot pass through C functions."""

    def held(*args: Any, **kwargs: Any) -> Any:
        try:
            return fallback(*args, **kwargs)
        except BaseException as error:
            python_runtime().opsmith_hold(ctypes.py_object(error), _text(error))
            placeholders = [torch.empty(0) for _ in range(results)]
            return (placeholders[0] if results == 1 else tuple(placeholders)) if results else None

    return held


def _text(error: BaseException) -> bytes:
    """Return the text of an exception for callers outside of Python; its class name if it has no text."""
    try:
        return str(error).encode(errors="replace")
    except Exception:  # raised by its own `__str__`
        return type(error).__qualname__.encode(errors="replace")


def _torch_version() -> int:
    """Return torch's version in the format of its C functions: a byte each for major, minor and patch."""
    major, minor, patch = (int(part) for part in torch.__version__.split("+")[0].split(".")[:3])
    return major << 56 | minor << 48 | patch << 40
