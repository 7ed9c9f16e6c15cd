"""What the CUDA kernels of an operator take of a GPU, found out without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cpp.generating import TYPES
from opsmith.build.cuda.generating import Instance
from opsmith.build.cuda.occupancy import occupancy
from opsmith.core.operator import Operator
from opsmith.core.samples import Make, samples_of
from opsmith.kernels.choosing import plain
from opsmith.kernels.cuda import Choice, CudaKernel
from opsmith.kernels.launching import Geometry

ARCHITECTURES = ("sm_80", "sm_90")
"""What is compiled for where nothing else is said."""


Calls = Callable[[torch.dtype], Iterable[list[Any]]]
"""The argument values of each sample, with floating tensors in a dtype."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an instance of a kernel takes on one architecture.

    Attributes:
        operator: Name of the operator.
        where: `file:line` of the kernel.
        kernel: Name of the function.
        instance: dtype and constants, as text; empty for what is no template.
        architecture: As `sm_90`.
        registers: Of a thread.
        spill_stores: Bytes that a thread spills.
        spill_loads: Bytes that it reads back.
        stack: Bytes of memory that a thread has for what fits in no register.
        shared: Bytes of static shared memory of a block.
        dynamic_shared: Bytes of dynamic shared memory, in the samples' calls at most.
        threads: Of a block, in the samples' calls at most; None where no sample says.
        occupancy: The part of a multiprocessor's warps that are resident; None where it cannot be told.
        faults: What is more than its author allows.
    """

    operator: str
    where: str
    kernel: str
    instance: str
    architecture: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    dynamic_shared: int
    threads: int | None
    occupancy: float | None
    faults: tuple[str, ...]

    @property
    def spills(self) -> int:
        """Bytes that a thread spills and reads back."""
        return self.spill_stores + self.spill_loads


def cuda_kernels(operator: Operator[..., Any]) -> list[CudaKernel]:
    """The CUDA kernels of an operator, in the order in which they are tried."""
    kernels = dict.fromkeys(each.function for each in operator.specification.kernels)
    return [each for each in kernels if isinstance(each, CudaKernel)]


def usage_of(
    operator: Operator[..., Any],
    kernel: CudaKernel,
    architectures: Sequence[str] = ARCHITECTURES,
    calls: Calls | None = None,
) -> Iterator[Usage]:
    """Compile every instance of a kernel that samples need, and say what it takes.

    Args:
        operator: Whose kernel it is.
        kernel: The kernel.
        architectures: What to compile for.
        calls: Gives argument values in a dtype; by default the operator's own samples.

    Raises:
        CompileError, ToolchainError: If NVRTC refuses the source, or there is none.
        MissingSamplesError: If its constants depend on sizes, and there is no sample.
        KernelSignatureError, LaunchError, SampleError: As their names say.
    """
    for architecture in architectures:
        needed = _instances(operator, kernel, architecture, calls or _own_samples(operator))
        for instance, geometry in needed.items():
            yield _usage(operator, kernel, instance, geometry, architecture)


def _usage(
    operator: Operator[..., Any],
    kernel: CudaKernel,
    instance: Instance,
    geometry: Geometry | None,
    architecture: str,
) -> Usage:
    found = kernel.compiled(instance, architecture).resources
    dynamic = 0 if geometry is None else geometry.shared
    threads = None if geometry is None else geometry.threads
    estimate = (
        None if threads is None else occupancy(architecture, threads, found.registers, found.shared + dynamic)
    )
    limits = kernel.limits
    faults = []
    if limits.spills is not None and found.spills > limits.spills:
        faults.append(f"it spills {found.spills} bytes, and max_spills is {limits.spills}")
    if limits.registers is not None and found.registers > limits.registers:
        faults.append(f"it takes {found.registers} registers, and max_registers is {limits.registers}")
    if estimate == 0:
        faults.append(
            f"no block of {threads} threads, {found.registers} registers each, and {found.shared + dynamic} "
            "bytes of shared memory fits on a multiprocessor"
        )
    return Usage(
        operator.name,
        kernel.where,
        kernel.entry,
        str(instance),
        architecture,
        found.registers,
        found.spill_stores,
        found.spill_loads,
        found.stack,
        found.shared,
        dynamic,
        threads,
        estimate,
        tuple(faults),
    )


def _instances(
    operator: Operator[..., Any], kernel: CudaKernel, architecture: str, calls: Calls
) -> dict[Instance, Geometry | None]:
    """What the samples need, each with the most that a launch of it takes."""
    found: dict[Instance, Geometry | None] = {}
    for dtype in kernel.dtypes or TYPES:
        for values in calls(dtype):
            choice = kernel.choose(values, architecture)
            if isinstance(choice, Choice):
                geometry = kernel.plan(choice, values).geometry
                found[choice.instance] = _larger(found.get(choice.instance), geometry)
    left = [dtype for dtype in kernel.dtypes or (None,) if not any(each.dtype is dtype for each in found)]
    if left and (kernel.dtypes or not found):
        found |= dict.fromkeys(_without_sample(operator, kernel, left, architecture))
    return found


def _without_sample(
    operator: Operator[..., Any],
    kernel: CudaKernel,
    dtypes: Sequence[torch.dtype | None],
    architecture: str,
) -> list[Instance]:
    """The instances for dtypes that no sample reaches: nothing tells how many threads a block of them has."""
    constants = kernel.launching.fixed_constants()
    if constants is None:
        named = ", ".join(plain(dtype) for dtype in dtypes if dtype is not None)
        raise errors.MissingSamplesError(
            f"no sample says what its CUDA kernel is compiled for{f' in {named}' if named else ''}: its "
            "constants depend on sizes",
            operator=operator.name,
            where=kernel.where,
            hint="write `@op.samples` over a function of `make` that yields arguments which the kernel takes",
        )
    instances = [Instance(dtype, constants) for dtype in dtypes]
    for instance in instances:
        kernel.check(instance, architecture)
    return instances


def _own_samples(operator: Operator[..., Any]) -> Calls:
    specification = operator.specification

    def calls(dtype: torch.dtype) -> Iterator[list[Any]]:
        if specification.samples is not None:
            made = samples_of(specification.samples, Make(dtype), specification.schema, specification.name)
            for call in made:
                yield specification.schema.call_values(call.args, call.kwargs)

    return calls


def _larger(first: Geometry | None, second: Geometry | None) -> Geometry | None:
    """Of two launches the one whose blocks have more threads, and then more shared memory."""
    both = [each for each in (first, second) if each is not None]
    return max(both, key=lambda each: (each.threads, each.shared), default=None)
