"""CUDA kernels compiled ahead of time for an operator's samples, and the resources that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.core.samples import Make, samples_of
from opsmith.kernels.common.gpu_resources import ARCHITECTURES, KernelUsage, occupancy
from opsmith.kernels.common.parameters import dtype_name
from opsmith.kernels.cpp.codegen import CPP_TYPES
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.kernel import CudaChoice, CudaKernel
from opsmith.kernels.cuda.launch import Geometry

SampleValues = Callable[[torch.dtype], Iterable[list[Any]]]
"""Argument values of each sample, with floating-point tensors in a dtype."""


def cuda_kernels(operator: Operator[..., Any]) -> list[CudaKernel]:
    """Return the CUDA kernels of an operator, in the order in which they are tried."""
    kernels = dict.fromkeys(each.function for each in operator.specification.kernels)
    return [each for each in kernels if isinstance(each, CudaKernel)]


def cuda_usage(
    operator: Operator[..., Any],
    kernel: CudaKernel,
    architectures: Sequence[str] = ARCHITECTURES,
    calls: SampleValues | None = None,
) -> Iterator[KernelUsage]:
    """Compile every instance of a kernel that samples need, and yield the resources that it uses.

    Args:
        operator: The operator.
        kernel: Its kernel.
        architectures: Architectures to compile for.
        calls: Returns argument values in a dtype; by default those of the operator's samples.

    Raises:
        CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
        MissingSamplesError: If the kernel's constants depend on sizes, and there is no sample.
        KernelSignatureError, LaunchError, SampleError: See `CudaKernel` and `samples_of`.
    """
    for architecture in architectures:
        needed = _instances(kernel, architecture, calls or _own_samples(operator))
        for instance, geometry in needed.items():
            yield _usage(kernel, instance, geometry, architecture)


def _usage(
    kernel: CudaKernel, instance: Instance, geometry: Geometry | None, architecture: str
) -> KernelUsage:
    used = kernel.compile(instance, architecture).resources
    dynamic = 0 if geometry is None else geometry.shared
    threads = None if geometry is None else geometry.threads
    shared = used.shared + dynamic
    estimate = None if threads is None else occupancy(architecture, threads, used.registers, shared)
    limits = kernel.limits
    faults = []
    if limits.spills is not None and used.spills > limits.spills:
        faults.append(f"it spills {used.spills} bytes, and max_spills is {limits.spills}")
    if limits.registers is not None and used.registers > limits.registers:
        faults.append(f"it takes {used.registers} registers, and max_registers is {limits.registers}")
    if estimate == 0:
        faults.append(
            f"no block of {threads} threads, {used.registers} registers each, and {shared} "
            "bytes of shared memory fits on a multiprocessor"
        )
    return KernelUsage.of(kernel, str(instance), architecture, used, dynamic, threads, estimate, faults)


def _instances(kernel: CudaKernel, architecture: str, calls: SampleValues) -> dict[Instance, Geometry | None]:
    """Return the instances that samples need, each with its largest launch."""
    found: dict[Instance, Geometry | None] = {}
    for dtype in kernel.dtypes or CPP_TYPES:
        for values in calls(dtype):
            choice = kernel.choose(values, architecture)
            if isinstance(choice, CudaChoice):
                geometry = kernel.plan(choice, values).geometry
                found[choice.instance] = _larger(found.get(choice.instance), geometry)
    left = [dtype for dtype in kernel.dtypes or (None,) if not any(each.dtype is dtype for each in found)]
    if left and (kernel.dtypes or not found):
        found |= dict.fromkeys(_without_sample(kernel, left, architecture))
    return found


def _without_sample(
    kernel: CudaKernel, dtypes: Sequence[torch.dtype | None], architecture: str
) -> list[Instance]:
    """Return the instances for dtypes that no sample reaches; their blocks are unknown."""
    constants = kernel.rules.fixed_constants()
    if constants is None:
        named = ", ".join(dtype_name(dtype) for dtype in dtypes if dtype is not None)
        raise kernel.error(
            errors.MissingSamplesError,
            f"no sample says what its CUDA kernel is compiled for{f' in {named}' if named else ''}: its "
            "constants depend on sizes",
            hint="write `@op.samples` over a function of `make` that yields arguments which the kernel takes",
        )
    instances = [Instance(dtype, constants) for dtype in dtypes]
    for instance in instances:
        kernel.check(instance, architecture)
    return instances


def _own_samples(operator: Operator[..., Any]) -> SampleValues:
    specification = operator.specification

    def calls(dtype: torch.dtype) -> Iterator[list[Any]]:
        if specification.samples is not None:
            made = samples_of(specification.samples, Make(dtype), specification.schema, specification.name)
            for call in made:
                yield specification.schema.call_values(call.args, call.kwargs)

    return calls


def _larger(first: Geometry | None, second: Geometry | None) -> Geometry | None:
    """Return the launch whose blocks have more threads, and then more shared memory."""
    both = [each for each in (first, second) if each is not None]
    return max(both, key=lambda each: (each.threads, each.shared), default=None)
