"""Resources of kernels in Triton, which are compiled for an operator's samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.tensors import map_tensors, on_meta
from opsmith.kernels.common.gpu_resources import ARCHITECTURES, KernelUsage, occupancy
from opsmith.kernels.common.gpu_usage import GpuUsage
from opsmith.kernels.common.sample_values import SampleValues, sample_values
from opsmith.kernels.triton.compiler import Specialization, compile_specialization, specialization_of
from opsmith.kernels.triton.kernel import TritonKernel


def triton_usage(
    kernel: TritonKernel, architectures: Sequence[str] = ARCHITECTURES, calls: SampleValues | None = None
) -> Iterator[KernelUsage]:
    """Compile a Triton kernel for each specialization of the operator's samples. No GPU is needed.

    Floating-point tensors get each dtype that the kernel takes. Every configuration of `triton.autotune` is
    compiled. Addresses are assumed to be divisible by 16, as in torch's allocations.

    Args:
        kernel: The kernel.
        architectures: For example `sm_80`, `sm_90`.
        calls: Function that returns argument values in a dtype; by default the values of the samples.

    Returns:
        Resources that each specialization uses.

    Raises:
        MissingSamplesError: If the operator has no samples, or no sample that the kernel takes.
        ToolchainError: If Triton is not installed.
        UsageError: If Triton does not compile for an architecture.
        CompileError: If Triton refuses the kernel.
    """
    wanted = specializations(kernel, calls)
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
                # Its static shared memory includes the bytes that the architecture reserves for every block.
                occupancy=occupancy(architecture, cubin.threads, used.registers, cubin.shared),
                faults=(),
            )


def specializations(kernel: TritonKernel, calls: SampleValues | None = None) -> list[Specialization]:
    """Return the specializations of the operator's samples, in every dtype that the kernel takes.

    Floating-point tensors of a sample are cast to each of these dtypes. See `triton_usage`.
    """
    specification = kernel.operator.specification
    if calls is None and specification.samples is None:
        raise kernel.error(
            errors.MissingSamplesError,
            "there are no samples for which its kernel could be compiled",
            hint=f"write `@{specification.variable}.samples` over a function of `make` that yields tuples "
            "of arguments",
        )
    found: dict[str, Specialization] = {}
    reasons: list[str] = []
    floating = sorted((dtype for dtype in kernel.dtypes if dtype.is_floating_point), key=str)
    for dtype in floating or [torch.float32]:
        for given in calls(dtype) if calls else sample_values(kernel.operator, dtype):
            pairs = zip(specification.schema.arguments, given, strict=True)
            restored = [argument.kind.restore(value) for argument, value in pairs]
            values = map_tensors(partial(_cast_on_meta, dtype), restored)
            refused = kernel.value_refusal(values)
            if refused is None:
                found |= _specializations(kernel, values)
            else:
                reasons.append(refused)
    if not found:
        raise kernel.error(
            errors.MissingSamplesError,
            "its Triton kernel takes none of the samples, so nothing is compiled",
            got="; ".join(dict.fromkeys(reasons)) or "no samples",
            hint=f"in `@{specification.variable}.samples`, yield arguments that the kernel takes; only "
            "floating-point tensors are cast to the dtypes of the kernel",
        )
    return list(found.values())


def _cast_on_meta(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a tensor without data, in this dtype if it is a floating-point tensor."""
    return on_meta(tensor, dtype if tensor.is_floating_point() else None)


def _specializations(kernel: TritonKernel, values: Sequence[Any]) -> dict[str, Specialization]:
    """Return the specializations for the values of a call by their text, one for each configuration."""
    found: dict[str, Specialization] = {}
    prepared = kernel.prepare(values)
    for config in kernel.source.configs or (None,):
        each = specialization_of(kernel.source, kernel.source.with_filled(prepared.arguments, config))
        found[repr(each)] = each
    return found


class TritonUsage(GpuUsage):
    """Resources of kernels that Triton's compiler reports."""

    usage = staticmethod(triton_usage)

    def refuse_unknown(self, architectures: Sequence[str]) -> None:
        """Do nothing, since Triton itself refuses unknown architectures."""
