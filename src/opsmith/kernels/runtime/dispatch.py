"""Kernels that are called through torch's dispatcher without Python, by entries of the runtime."""

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
        """Let calls of an operator on a device come in here.

        Returns:
            Function that ends the registration. No other thread may call the operator then.

        Raises:
            ToolchainError: If torch refuses the kernel, or no entry is left.
        """
        number = _take_number()
        registered: int | None = runtime().opsmith_register(
            self.address, number, namespace.encode(), device.encode(), name.encode()
        )
        if registered is None:
            _free.append(number)
            raise errors.ToolchainError(
                "torch does not take the kernel",
                expected="a torch whose dispatcher takes kernels from C",
                got=f"torch {torch.__version__}",
                hint="give the kernel in Python on this torch",
            )

        def deregister() -> None:
            runtime().opsmith_deregister(registered)
            _free.append(number)

        return deregister


class DispatchedKernel:
    """Kernel with an operator of its own, which runs it and nothing else below autograd, and with its plans.

    It stays as long as the process, but does not hold the kernel: a call in another thread may be about to
    use it. Once the kernel is gone, another one of its operator may take the place.

    Args:
        operator: Name of the operator that it computes.
        schema: Text of the operator's schema, without its name.
        signature: The arguments as numbers, as the runtime reads them.
        results: Number of results.
        device: Dispatch key of its device, as `CPU`.

    Attributes:
        overload: The operator of the kernel's own.
        library: What the kernel was loaded from, for its own use.

    Raises:
        ToolchainError: If torch refuses the kernel, or no entry is left.
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
        entry.register(NAMESPACE, name, "CompositeExplicitAutograd")  # whoever calls it has chosen the kernel
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        self._record: int = python_runtime().opsmith_record(
            _packed(signature), results, ctypes.py_object(self._make_error)
        )
        _by_record[self._record] = self
        runtime().opsmith_publish(entry.address, self._record)

    @property
    def owner(self) -> object | None:
        """The kernel; None once it is gone."""
        return self._owner()

    def take(
        self, owner: object, without_plan: Callable[..., Any], failed: Callable[[str], Exception]
    ) -> None:
        """Give the place to a kernel; the arguments are those of `dispatched_kernel`."""
        self.release()
        self._owner = weakref.ref(owner)
        self._without_plan, self._failed = weakref.WeakMethod(without_plan), weakref.WeakMethod(failed)

    def serve(self, fallback: Callable[..., Any]) -> Callable[[], None] | None:
        """Take the calls of its operator on its device.

        Args:
            fallback: Computes calls without a plan, in Python.

        Returns:
            Function that ends the registration, if this call has made it. No other thread may call the
            operator then.
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
            _served[key] = entry  # first: `withdraw` must find it after an interrupt
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
        """Take no calls of the operator any more, and drop all plans."""
        with _lock:
            entry = _served.get((self._operator, self._device))
            if entry is not None:
                runtime().opsmith_withdraw(entry.address, self._record)
        runtime().opsmith_forget(self._record)

    def release(self) -> None:
        """Forget all that calls have left here. Calls under way end normally, others go to the fallback."""
        self.withdraw()
        runtime().opsmith_forget_copies(self._record)

    def pending(self) -> int | None:
        """Return the signature of the call that is in the fallback in this thread, for one `remember`."""
        signature: int | None = runtime().opsmith_pending(self._record)
        return signature

    def remember(self, signature: int, plan: Plan | None) -> None:
        """Run calls of this signature by a plan from now on, and those of its kind by its recipe."""
        recipe = None if plan is None else plan.recipe
        packed = [None if each is None else _packed(each.encode()) for each in (plan, recipe)]
        runtime().opsmith_remember(self._record, signature, *packed)

    @property
    def cached_plans(self) -> int:
        """Number of call signatures with a plan."""
        count: int = runtime().opsmith_cached_plans(self._record)
        return count

    def copies(self, argument: int) -> int:
        """Return the number of copies of an argument for its layout; results come after the last argument."""
        count: int = runtime().opsmith_copies(self._record, argument)
        return count

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call of the kernel's own operator that has no plan."""
        without_plan = self._without_plan()
        if without_plan is None:  # a call under way of a kernel that is gone
            namespace, _, name = self._operator.partition("::")
            return getattr(getattr(torch.ops, namespace), name)(*args, **kwargs)
        return without_plan(*args, **kwargs)

    def _make_error(self, text: str) -> Exception:
        failed = self._failed()
        return failed(text) if failed else errors.KernelError(text, operator=self._operator)


_by_record: dict[int, DispatchedKernel] = {}
_places: dict[tuple[Any, ...], list[DispatchedKernel]] = {}
"""Places of kernels, by the operator that they compute, its arguments, and the device."""
_served: dict[tuple[str, str], _Entry] = {}
"""Entry by which calls of an operator on a device come in."""
_free: list[int] = []
"""Numbers of entries that nothing uses any more."""
_used = itertools.count()


def _packed(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _take_number() -> int:
    """Return the number of an entry that nothing uses."""
    number = _free.pop() if _free else next(_used)
    if number < (most := runtime().opsmith_most_entries()):
        return number
    raise errors.ToolchainError(
        "there is no room for another kernel that is called without Python",
        expected=f"at most {most} operators in one process: one for each kernel, and one for each operator",
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
    """Return a kernel's place in the dispatcher: its own, that of a kernel that is gone, or a new one.

    Args:
        owner: The kernel.
        operator: Name of the operator that it computes.
        schema: Text of the operator's schema, without its name.
        arguments: Parameter for each argument.
        free: For each argument, True if its numbers of floating point are no part of a call's signature.
        by_address: True if a call's signature has if the address of each tensor is divisible by 16.
        results: Number of results.
        device: Dispatch key of its device, as `CPU`.
        without_plan: Method of the kernel that computes calls without a plan, in Python.
        failed: Method of the kernel that makes an exception from the text that it threw.

    Raises:
        ToolchainError: If torch refuses the kernel, or no entry is left.
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
    """Return the fallback of the kernels' own operators, or of `operator`."""
    return _Fallback(schema, results)


def _without_plan(*args: Any, **kwargs: Any) -> Any:
    """Compute a call of a kernel's own operator that has no plan."""
    return _by_record[runtime().opsmith_pending_record()].compute(*args, **kwargs)


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
