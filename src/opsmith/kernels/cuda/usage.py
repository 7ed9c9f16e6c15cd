"""Resources of kernels in CUDA C++, which are compiled for an operator's samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from opsmith import errors
from opsmith.kernels.common.dtypes import CPP_TYPES, dtype_name
from opsmith.kernels.common.gpu_resources import ARCHITECTURES, KernelUsage, occupancy
from opsmith.kernels.common.gpu_usage import GpuUsage
from opsmith.kernels.common.memory_access import KernelAccess
from opsmith.kernels.common.sample_values import SampleValues, sample_values
from opsmith.kernels.cuda.compiler import Instance, refuse_unknown_architectures
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.launch import Geometry
from opsmith.kernels.cuda.nvrtc import find_nvrtc
from opsmith.kernels.cuda.plan import CudaChoice


def _usage(
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
            f"a multiprocessor has no room for a block of {threads} threads, {used.registers} registers "
            f"each, and {shared} bytes of shared memory"
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
        architecture: For example `sm_90`.
        calls: Function that returns argument values in a dtype.

    Raises:
        CompileError, ToolchainError, MissingSamplesError, KernelSignatureError, LaunchError, SampleError: See
            `CudaUsage.usage`.
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
    """Return the instances for dtypes in which the kernel runs no sample; their blocks are unknown."""
    constants = [launch.fixed_constants() for launch in kernel.rules.launches]
    fixed = [each for each in constants if each is not None]
    if len(fixed) < len(constants):
        named = ", ".join(dtype_name(dtype) for dtype in dtypes if dtype is not None)
        raise kernel.error(
            errors.MissingSamplesError,
            "the constants of its CUDA kernel depend on sizes, but no sample gives sizes"
            f"{f' in {named}' if named else ''}",
            hint="in `@op.samples`, yield arguments that the kernel takes",
        )
    instances = [*dict.fromkeys(each for dtype in dtypes for each in kernel.variant(dtype, fixed))]
    kernel.candidates(instances, architecture)
    return instances


def _larger(first: Geometry | None, second: Geometry | None) -> Geometry | None:
    """Return the launch with more threads per block; if these are equal, with more shared memory."""
    both = [each for each in (first, second) if each is not None]
    return max(both, key=lambda each: (each.threads, each.shared), default=None)


class CudaUsage(GpuUsage):
    """Resources, which NVRTC reports, and memory accesses, which the emulation counts."""

    has_limits, models_access = True, True

    def usage(
        self,
        kernel: CudaKernel,
        architectures: Sequence[str] = ARCHITECTURES,
        calls: SampleValues | None = None,
    ) -> Iterator[KernelUsage]:
        """Compile instances with NVRTC; see `GpuUsage.usage`.

        Raises:
            KernelSignatureError, LaunchError, SampleError: See `CudaKernel` and `samples_of`.
        """
        calls = calls or partial(sample_values, kernel.operator)
        for architecture in architectures:
            for instance, geometry in needed_instances(kernel, architecture, calls).items():
                yield _usage(kernel, instance, geometry, architecture)

    def refuse_unknown(self, architectures: Sequence[str]) -> None:
        """Refuse architectures that NVRTC does not know."""
        refuse_unknown_architectures(architectures)

    def versions(self) -> Mapping[str, str]:
        """Return the version of NVRTC."""
        return {"nvrtc": ".".join(map(str, find_nvrtc().version))}

    def accesses(
        self, kernel: CudaKernel, calls: SampleValues, dtypes: Sequence[torch.dtype] = ()
    ) -> list[KernelAccess]:
        """Return the access model of a kernel; see `kernel_access`."""
        from opsmith.kernels.cuda.emulation.access_model import kernel_access  # few commands need it

        return kernel_access(kernel, calls, dtypes)
