"""The kernels of an operator: where each is, what it takes, and what it takes of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from opsmith import errors
from opsmith.checking.report import ordered
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.operator import Operator
from opsmith.kernels.cpp import CppKernel
from opsmith.kernels.cuda import CudaKernel
from opsmith.kernels.cuda_report import ARCHITECTURES, Usage, usage_of
from opsmith.kernels.triton import TritonKernel
from opsmith.kernels.triton_ahead import triton_usage

LANGUAGES: tuple[tuple[type, str], ...] = (
    (CppKernel, "C++"),
    (CudaKernel, "CUDA C++"),
    (TritonKernel, "Triton"),
)


@dataclass(frozen=True)
class Listed:
    """One kernel.

    Args:
        device: Type of device.
        language: What it is written in.
        entry: Name of the function.
        where: `file:line` of it.
        dtypes: The dtypes that it is declared for; empty where that is not said.
    """

    device: str
    language: str
    entry: str
    where: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Kernels:
    """All kernels of an operator.

    Args:
        listed: Each of them.
        usage: What those for CUDA take of a GPU, on each architecture.
        refused: Why nothing can be said of some.
    """

    listed: tuple[Listed, ...]
    usage: tuple[Usage, ...]
    refused: tuple[str, ...]

    def summary(self) -> str:
        """What those for CUDA take, in a line."""
        spills = max(each.spills for each in self.usage)
        registers = _range(each.registers for each in self.usage)
        part = _range(round(100 * each.occupancy) for each in self.usage if each.occupancy is not None)
        architectures = ", ".join(dict.fromkeys(each.architecture for each in self.usage))
        forms = f"{len(self.usage)} form{'s' * (len(self.usage) != 1)} compiled for {architectures}"
        spilling = f"up to {spills} bytes spilled" if spills else "nothing spilled"
        told = f"{forms}: {registers} registers, {spilling}"
        return f"{told}, occupancy {part} %" if part else told


def _range(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    if not found:
        return ""
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def kernels_of(operator: Operator[..., Any], architectures: Sequence[str] = ARCHITECTURES) -> Kernels:
    """The kernels of an operator; those for CUDA are compiled, which needs neither a GPU nor a driver."""
    used: list[Usage] = []
    refused: list[str] = []
    for kernel in operator.specification.kernels:
        function = kernel.function
        try:
            if isinstance(function, CudaKernel):
                used += usage_of(operator, function, architectures)
            elif isinstance(function, TritonKernel):
                used += triton_usage(function, architectures)
        except errors.OpsmithError as error:
            refused.append(str(error))
    return Kernels(listed(operator.specification.kernels), tuple(used), tuple(refused))


def listed(kernels: Sequence[Kernel]) -> tuple[Listed, ...]:
    """The kernels, each function once, whatever number of dtypes it was declared for, one by one."""
    found: dict[tuple[str, str, str, str], dict[str, None]] = {}
    for kernel in kernels:
        function = kernel.function
        language = next((word for kind, word in LANGUAGES if isinstance(function, kind)), "Python")
        if isinstance(function, BuiltKernel):
            entry, dtypes = function.entry, function.dtypes or kernel.dtypes or ()
        else:
            entry = str(getattr(function, "__name__", type(function).__qualname__))
            dtypes = kernel.dtypes or ()
        names = found.setdefault((kernel.device, language, entry, kernel.where), {})
        names.update(dict.fromkeys(str(each).removeprefix("torch.") for each in dtypes))
    return tuple(Listed(*key, ordered(names)) for key, names in found.items())
