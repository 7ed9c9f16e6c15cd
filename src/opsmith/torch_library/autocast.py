"""Autocast: inputs are cast before the operator runs, so that formulas never get mixed dtypes.

`"promote"` casts to the widest dtype among the inputs, `"lower"` to autocast's dtype, `"float32"` to float32.
As in torch's own operators, float64 and integers are not cast.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.core.specification import Autocast
from opsmith.core.tensors import sequence_like
from opsmith.torch_library import capabilities


def autocast_kernel(
    operator: Any, device: str, rule: Any, written: Collection[int | str] = frozenset()
) -> Any:
    """The kernel for the autocast key of a device.

    Args:
        operator: The operator to call with cast inputs, while the key is off.
        device: Device type.
        rule: A function that returns the operator's rule at the time of the call.
        written: Positions and names of the arguments that it writes into, which are never cast.
    """

    def kernel(_keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        given: dict[int | str, Any] = {}
        given.update(enumerate(args))
        given.update(kwargs.items())
        read = {place: value for place, value in given.items() if place not in written}
        dtype = _target(rule(), device, tensors_in([*read.values()]))
        with capabilities.without_autocast(device):
            if dtype is None:
                return operator(*args, **kwargs)
            given.update((place, _cast(value, device, dtype)) for place, value in read.items())
            return operator(
                *(given[place] for place in range(len(args))), **{name: given[name] for name in kwargs}
            )

    return kernel


def in_force(kernels: Mapping[str, Any], tensors: Iterable[Tensor]) -> Any:
    """The kernel of a device type that has a tensor, and for which autocast is on; None if it is off.

    The dispatcher runs transforms of `torch.func` before autocast. The casts must be inside a transform, so
    that gradients pass through them and formulas get the cast values.
    """
    devices = {tensor.device.type for tensor in tensors} & kernels.keys()
    return next((kernels[device] for device in sorted(devices) if torch.is_autocast_enabled(device)), None)


def without_casts(tensors: Sequence[Tensor | None]) -> AbstractContextManager[Any]:
    """Context without autocast for a backward: the inputs were cast in the forward.

    torch's own derivative formulas compute in the dtypes of the forward, too, wherever `backward` is called.
    """
    device = next((tensor.device.type for tensor in tensors if tensor is not None), None)
    if device not in capabilities.AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return nullcontext()
    return capabilities.without_autocast(device)


@functools.cache
def _devices() -> tuple[str, ...]:
    """Types of devices that have autocast here."""
    return tuple(filter(torch.amp.is_autocast_available, capabilities.AUTOCAST_DEVICES))


def autocast_in_force() -> str:
    """Current autocast: a dtype for each type of device, as text; empty if it is off.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     autocast_in_force()
        'cpu=bfloat16'
    """
    if not capabilities.any_autocast():
        return ""
    on = filter(torch.is_autocast_enabled, _devices())
    return ",".join(f"{device}={torch.get_autocast_dtype(device)}".replace("torch.", "") for device in on)


def autocasting(state: str | None) -> AbstractContextManager[Any]:
    """Context with the autocast of a call, from `autocast_in_force`; None leaves the current autocast."""
    if state is None or state == autocast_in_force():
        return nullcontext()
    wanted = dict(each.split("=") for each in state.split(",") if each)
    regions = ExitStack()
    for device in _devices():
        if device in wanted or torch.is_autocast_enabled(device):
            dtype = getattr(torch, wanted[device]) if device in wanted else None
            regions.enter_context(torch.autocast(device, dtype, enabled=device in wanted))
    return regions


_call = threading.local()


@contextmanager
def noting_autocast(state: str | None) -> Iterator[None]:
    """Context in which `autocast_of_call` returns this state: the autocast of the traced call."""
    before = autocast_of_call()
    _call.autocast = state
    try:
        yield
    finally:
        _call.autocast = before


def autocast_of_call() -> str | None:
    """Autocast of the running call of a class, for `autocasting`."""
    found: str | None = getattr(_call, "autocast", None)
    return found


def _eligible(tensor: Tensor, device: str) -> bool:
    return tensor.device.type == device and tensor.is_floating_point() and tensor.dtype is not torch.float64


def _target(rule: Autocast, device: str, tensors: list[Tensor]) -> torch.dtype | None:
    if rule == "lower":
        return torch.get_autocast_dtype(device)
    if rule == "float32":
        return torch.float32
    dtypes = {tensor.dtype for tensor in tensors if _eligible(tensor, device)}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _cast(value: Any, device: str, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if _eligible(value, device) else value
    if isinstance(value, list | tuple):
        return sequence_like(value, (_cast(item, device, dtype) for item in value))
    return value
