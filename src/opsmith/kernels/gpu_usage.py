"""Resources of GPU kernels, which are compiled ahead of time for an operator's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.core.samples import Make, samples_of
from opsmith.core.tensors import map_tensors, on_meta
from opsmith.kernels.common.dtypes import CPP_TYPES, dtype_name
from opsmith.kernels.common.gpu_resources import ARCHITECTURES, KernelUsage, occupancy
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.launch import Geometry
from opsmith.kernels.cuda.plan import CudaChoice, without_data
from opsmith.kernels.triton.compiler import Specialization, compile_specialization, specialization_of
from opsmith.kernels.triton.kernel import TritonKernel

K = TypeVar("K", bound=CudaKernel | TritonKernel)
SampleValues = Callable[[torch.dtype], Iterable[list[Any]]]
"""Argument values of each sample, with floating-point tensors in a dtype."""


def gpu_kernels(operator: Operator[..., Any], language: type[K]) -> list[K]:
    """Return the kernels of an operator in one language, in the order in which they are tried."""
    kernels = dict.fromkeys(each.given for each in operator.specification.kernels)
    return [each for each in kernels if isinstance(each, language)]


def sample_values(operator: Operator[..., Any], dtype: torch.dtype) -> Iterator[list[Any]]:
    """Yield the argument values of each sample of an operator, with floating-point tensors in a dtype."""
    specification = operator.specification
    if specification.samples is not None:
        schema = specification.schema
        for call in samples_of(specification.samples, Make(dtype), schema, specification.name):
            yield schema.call_values(call.args, call.kwargs)


def cuda_usage(
    kernel: CudaKernel,
    architectures: Sequence[str] = ARCHITECTURES,
    calls: SampleValues | None = None,
) -> Iterator[KernelUsage]:
    """Compile every instance of a kernel that samples need, and yield the resources that it uses.

    Args:
        kernel: The kernel.
        architectures: Architectures to compile for.
        calls: Returns argument values in a dtype; by default those of the operator's samples.

    Raises:
        CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
        MissingSamplesError: If the kernel's constants depend on sizes, and there is no sample.
        KernelSignatureError, LaunchError, SampleError: See `CudaKernel` and `samples_of`.
    """
    calls = calls or partial(sample_values, kernel.operator)
    for architecture in architectures:
        for instance, geometry in needed_instances(kernel, architecture, calls).items():
            yield _cuda_usage(kernel, instance, geometry, architecture)


def _cuda_usage(
    kernel: CudaKernel, instance: Instance, geometry: Geometry | None, architecture: str
) -> KernelUsage:
    cubin = kernel.compile(instance, architecture)
    used = cubin.resources
    dynamic = 0 if geometry is None else geometry.shared
    threads = None if geometry is None else geometry.threads
    shared = used.shared + dynamic
    estimate = None if threads is None else occupancy(architecture, threads, used.registers, shared)
    rules = kernel.rules
    faults = []
    if rules.max_spills is not None and used.spills > rules.max_spills:
        faults.append(f"it spills {used.spills} bytes, and max_spills is {rules.max_spills}")
    if rules.max_registers is not None and used.registers > rules.max_registers:
        faults.append(f"it takes {used.registers} registers, and max_registers is {rules.max_registers}")
    if threads is not None and cubin.max_threads is not None and threads > cubin.max_threads:
        faults.append(f"a block has {threads} threads, and `__launch_bounds__` allows {cubin.max_threads}")
    if estimate == 0:
        faults.append(
            f"no block of {threads} threads, {used.registers} registers each, and {shared} "
            "bytes of shared memory fits on a multiprocessor"
        )
    return KernelUsage.of(
        kernel.operator.name,
        kernel.source.kernel(instance.entry),
        used,
        instance=str(instance),
        architecture=architecture,
        dynamic_shared=dynamic,
        threads=threads,
        occupancy=estimate,
        faults=tuple(faults),
    )


def needed_instances(
    kernel: CudaKernel, architecture: str, calls: SampleValues
) -> dict[Instance, Geometry | None]:
    """Return the instances that samples need, each with its largest launch.

    Args:
        kernel: The kernel.
        architecture: As `sm_90`.
        calls: Returns argument values in a dtype.

    Raises:
        CompileError, ToolchainError, MissingSamplesError, KernelSignatureError, LaunchError, SampleError: See
            `cuda_usage`.
    """
    found: dict[Instance, Geometry | None] = {}
    for dtype in kernel.dtypes or CPP_TYPES:
        for values in calls(dtype):
            choice = kernel.choose(values, architecture)
            if isinstance(choice, CudaChoice):
                found |= {each: found.get(each) for each in choice.instances}
                for launch in kernel.plan(choice, values).launches:
                    found[launch.instance] = _larger(found[launch.instance], launch.geometry)
    left = [dtype for dtype in kernel.dtypes or (None,) if not any(each.dtype is dtype for each in found)]
    if left and (kernel.dtypes or not found):
        found |= dict.fromkeys(_without_sample(kernel, left, architecture))
    return found


def _without_sample(
    kernel: CudaKernel, dtypes: Sequence[torch.dtype | None], architecture: str
) -> list[Instance]:
    """Return the instances for dtypes that no sample reaches; their blocks are unknown."""
    constants = [launch.fixed_constants() for launch in kernel.rules.launches]
    fixed = [each for each in constants if each is not None]
    if len(fixed) < len(constants):
        named = ", ".join(dtype_name(dtype) for dtype in dtypes if dtype is not None)
        raise kernel.error(
            errors.MissingSamplesError,
            f"no sample gives sizes for its CUDA kernel{f' in {named}' if named else ''}, whose constants "
            "depend on them",
            hint="write `@op.samples` over a function of `make` that yields arguments which the kernel takes",
        )
    instances = [*dict.fromkeys(each for dtype in dtypes for each in kernel.variant(dtype, fixed))]
    kernel.candidates(instances, architecture)
    return instances


def _larger(first: Geometry | None, second: Geometry | None) -> Geometry | None:
    """Return the launch whose blocks have more threads, and then more shared memory."""
    both = [each for each in (first, second) if each is not None]
    return max(both, key=lambda each: (each.threads, each.shared), default=None)


def triton_usage(kernel: TritonKernel, architectures: Sequence[str] = ARCHITECTURES) -> Iterator[KernelUsage]:
    """Compile a Triton kernel for each specialization of the operator's samples. No GPU is needed.

    Floating-point tensors have each dtype that the kernel takes. Every configuration of `triton.autotune` is
    compiled. Addresses are assumed to be divisible by 16, as torch allocates.

    Args:
        kernel: The kernel.
        architectures: As `sm_80`, `sm_90`.

    Returns:
        Resources that each uses.

    Raises:
        MissingSamplesError: If the operator has no samples, or none that the kernel takes.
        ToolchainError: If Triton is not installed.
        UsageError: If Triton does not compile for an architecture.
        CompileError: If Triton refuses the kernel.
    """
    wanted = specializations(kernel)
    for architecture in architectures:
        for each in wanted:
            cubin = compile_specialization(kernel.source, kernel.operator.name, each, architecture)
            used = cubin.resources
            yield KernelUsage.of(
                kernel.operator.name,
                kernel.source,
                used,
                instance=str(each),
                architecture=architecture,
                dynamic_shared=cubin.shared,
                threads=cubin.threads,
                # Its static shared memory includes what every block of the architecture reserves.
                occupancy=occupancy(architecture, cubin.threads, used.registers, cubin.shared),
                faults=(),
            )


def specializations(kernel: TritonKernel) -> list[Specialization]:
    """Return the specializations of the operator's samples, in every dtype that the kernel takes.

    Floating-point tensors of a sample are cast to each of these dtypes.

    Raises:
        MissingSamplesError: If the operator has no samples, or none that the kernel takes.
    """
    specification = kernel.operator.specification
    if specification.samples is None:
        raise kernel.error(
            errors.MissingSamplesError,
            "there are no samples to compile its kernel for",
            hint=f"write `@{specification.variable}.samples` over a function of `make` that yields tuples "
            "of arguments",
        )
    found: dict[str, Specialization] = {}
    reasons: list[str] = []
    floating = sorted((dtype for dtype in kernel.dtypes if dtype.is_floating_point), key=str)
    for dtype in floating or [torch.float32]:
        for given in sample_values(kernel.operator, dtype):
            values = map_tensors(partial(_cast_on_meta, dtype), without_data(specification.schema, given))
            refused = kernel.value_refusal(values)
            if refused is None:
                found |= _specializations(kernel, values)
            else:
                reasons.append(refused)
    if not found:
        raise kernel.error(
            errors.MissingSamplesError,
            "its Triton kernel takes none of the samples, so that nothing is compiled",
            got="; ".join(dict.fromkeys(reasons)) or "no samples",
            hint=f"yield arguments that the kernel takes from `@{specification.variable}.samples`; only "
            "floating-point tensors are cast to the dtypes of the kernel",
        )
    return list(found.values())


def _cast_on_meta(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a tensor without data, of another dtype if it is a floating-point tensor."""
    return on_meta(tensor, dtype if tensor.is_floating_point() else None)


def _specializations(kernel: TritonKernel, values: Sequence[Any]) -> dict[str, Specialization]:
    """Return the specializations for the values of a call, one for each configuration, by their text."""
    found: dict[str, Specialization] = {}
    prepared = kernel.prepare(values)
    for config in kernel.source.configs or (None,):
        arguments = dict(prepared.arguments)
        if config is not None:
            arguments |= config.all_kwargs()
        for name, heuristic in kernel.source.heuristics.items():
            arguments[name] = heuristic(arguments)
        each = specialization_of(kernel.source, arguments)
        found[repr(each)] = each
    return found
