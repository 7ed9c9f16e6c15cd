"""Kernels of an operator: device, language and dtypes, and the GPU resources of CUDA and Triton kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opsmith import errors
from opsmith.checking.report import ordered
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.operator import Operator
from opsmith.kernels.common.gpu_resources import ARCHITECTURES, KernelUsage
from opsmith.kernels.common.memory_access import KernelAccess
from opsmith.kernels.common.sample_values import sample_values
from opsmith.kernels.languages import language_of, with_gpu_usage


@dataclass(frozen=True)
class KernelEntry:
    """One kernel.

    Args:
        device: Type of device.
        language: Name of the language.
        entry: Name of the function.
        where: `file:line` of the function.
        dtypes: The declared dtypes; empty for all.
    """

    device: str
    language: str
    entry: str
    where: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class KernelList:
    """All kernels of an operator.

    Args:
        listed: The kernels.
        usage: The GPU resources of CUDA kernels, for each architecture.
        refused: Errors of kernels that cannot be compiled.
    """

    listed: tuple[KernelEntry, ...]
    usage: tuple[KernelUsage, ...]
    refused: tuple[str, ...]

    def summary(self) -> str:
        """The resources of CUDA kernels in one line."""
        spills = max(each.spills for each in self.usage)
        registers = _range(each.registers for each in self.usage)
        occupancy = _range(round(100 * each.occupancy) for each in self.usage if each.occupancy is not None)
        architectures = ", ".join(dict.fromkeys(each.architecture for each in self.usage))
        forms = f"{len(self.usage)} form{'s' * (len(self.usage) != 1)} compiled for {architectures}"
        spilling = f"up to {spills} bytes spilled" if spills else "nothing spilled"
        text = f"{forms}: {registers} registers, {spilling}"
        return f"{text}, occupancy {occupancy} %" if occupancy else text


def _range(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    if not found:
        return ""
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def kernels_of(operator: Operator[..., Any], architectures: Sequence[str] = ARCHITECTURES) -> KernelList:
    """The kernels of an operator; CUDA kernels are compiled, which needs neither a GPU nor a driver."""
    used: list[KernelUsage] = []
    refused: list[str] = []
    for kernel, usage in with_gpu_usage(operator.specification.kernels):
        try:
            used += usage.usage(kernel, architectures)
        except errors.OpsmithError as error:
            refused.append(str(error))
    return KernelList(kernel_entries(operator.specification.kernels), tuple(used), tuple(refused))


def accesses_of(operator: Operator[..., Any]) -> tuple[KernelAccess, ...]:
    """The access model of each kernel whose language has such a model, in one dtype.

    Raises:
        NotEmulatedError, KernelFaultError, MissingSamplesError: See `GpuUsage.accesses`.
    """
    calls, found = partial(sample_values, operator), list[KernelAccess]()
    for kernel, usage in with_gpu_usage(operator.specification.kernels):
        if usage.models_access:
            found += usage.accesses(kernel, calls, _first_dtype(kernel))
    return tuple(found)


def _first_dtype(kernel: BuiltKernel[Any]) -> tuple[torch.dtype, ...]:
    """Return float32 if a kernel takes it, else its first dtype; empty for a kernel that names no dtypes."""
    dtypes = sorted(kernel.dtypes or (), key=str)
    return (torch.float32,) if torch.float32 in dtypes else tuple(dtypes[:1])


def kernel_entries(kernels: Sequence[Kernel]) -> tuple[KernelEntry, ...]:
    """Return an entry for each function, also if it was declared several times for different dtypes."""
    found: dict[tuple[str, str, str, str], dict[str, None]] = {}
    for kernel in kernels:
        function = kernel.function
        known = language_of(function)
        language = "Python" if known is None else known.name
        if isinstance(function, BuiltKernel):
            entry, dtypes = function.source.entry, function.dtypes or kernel.dtypes or ()
        else:
            entry = str(getattr(function, "__name__", type(function).__qualname__))
            dtypes = kernel.dtypes or ()
        names = found.setdefault((kernel.device, language, entry, kernel.where), {})
        names.update(dict.fromkeys(str(each).removeprefix("torch.") for each in dtypes))
    return tuple(KernelEntry(*key, ordered(names)) for key, names in found.items())
