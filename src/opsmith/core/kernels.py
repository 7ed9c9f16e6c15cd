"""Kernels by device, and which one takes a call: accepted, or rejected with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.core.location import where


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function that computes the operator on one type of device.

    Args:
        device: Device type, as in `torch.device(...).type`.
        function: Takes and returns what the reference does.
        dtypes: The dtypes it takes; None means all.
    """

    device: str
    function: Callable[..., Any]
    dtypes: frozenset[torch.dtype] | None = None

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        return where(self.function)

    def consider(self, tensors: Iterable[torch.Tensor]) -> Accepted | Rejected:
        """Whether this kernel takes a call with these tensors."""
        for tensor in tensors:
            if tensor.device.type != self.device:
                return Rejected(self, f"a tensor is on {tensor.device.type}")
            if self.dtypes is not None and tensor.dtype not in self.dtypes:
                return Rejected(self, f"it does not take {tensor.dtype}")
        return Accepted(self)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A kernel that will run."""

    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kernel that will not run, and why."""

    kernel: Kernel
    reason: str


def choose(
    kernels: tuple[Kernel, ...], tensors: list[torch.Tensor]
) -> tuple[Accepted | None, tuple[Rejected, ...]]:
    """The first kernel that takes these tensors, and those that were rejected before it."""
    rejected: list[Rejected] = []
    for kernel in kernels:
        verdict = kernel.consider(tensors)
        if isinstance(verdict, Accepted):
            return verdict, tuple(rejected)
        rejected.append(verdict)
    return None, tuple(rejected)


def check_device(device: str, operator: str) -> None:
    """Refuse a device type that torch does not know."""
    try:
        known = torch.device(device).type == device
    except RuntimeError:
        known = False
    if not known:
        raise errors.DeviceNameError(
            "a kernel is declared for a device type that torch does not know",
            operator=operator,
            expected="a device type such as `cpu`, `cuda` or `mps`, without an index",
            got=repr(device),
            mend="write `op.kernel('cpu', ...)` or `op.kernel('cuda', ...)`",
        )


def dtypes_of(dtypes: Any, operator: str) -> frozenset[torch.dtype]:
    """The dtypes that a kernel is declared for; one alone may stand without a list.

    Raises:
        KernelDtypeError: If something among them is no dtype.
    """
    listed = [dtypes] if isinstance(dtypes, torch.dtype) else dtypes
    if isinstance(listed, Iterable):
        listed = list(listed)
        if all(isinstance(each, torch.dtype) for each in listed):
            return frozenset(listed)
    raise errors.KernelDtypeError(
        "a kernel is declared for something that is no dtype",
        operator=operator,
        argument="dtypes",
        expected="a list of torch.dtype",
        got=repr(dtypes),
        mend="write `dtypes=[torch.float32, torch.float64]`",
    )
