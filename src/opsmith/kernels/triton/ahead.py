"""Triton kernels compiled ahead of time for an operator's samples, and the resources that they use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.core.samples import Make, samples_of
from opsmith.kernels.common.gpu_resources import ARCHITECTURES, KernelUsage, occupancy
from opsmith.kernels.triton.compiler import Specialization, compile_specialization
from opsmith.kernels.triton.kernel import TritonKernel
from opsmith.kernels.triton.source import LAUNCH_OPTIONS

DIVISOR = 16
"""Triton specializes kernels for numbers that are divisible by this, and then vectorizes loads."""


def triton_kernels(operator: Operator[..., Any]) -> list[TritonKernel]:
    """Return the Triton kernels of an operator, in the order in which they are tried."""
    kernels = dict.fromkeys(each.function for each in operator.specification.kernels)
    return [each for each in kernels if isinstance(each, TritonKernel)]


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
        MissingSamplesError: If the operator has no samples.
        ToolchainError: If Triton is not installed.
        UsageError: If Triton does not compile for an architecture.
        CompileError: If Triton refuses the kernel.
    """
    wanted = specializations(kernel)
    for architecture in architectures:
        for each in wanted:
            yield _usage(kernel, each, architecture)


def _usage(kernel: TritonKernel, wanted: Specialization, architecture: str) -> KernelUsage:
    cubin = compile_specialization(kernel.source, kernel.operator.name, wanted, architecture)
    used = cubin.resources
    # The assembler's static shared memory includes what every block of the architecture reserves.
    estimate = occupancy(architecture, cubin.threads, used.registers, cubin.shared)
    return KernelUsage.of(kernel, str(wanted), architecture, used, cubin.shared, cubin.threads, estimate)


def specializations(kernel: TritonKernel) -> list[Specialization]:
    """Return the specializations of the operator's samples, in every dtype that the kernel takes.

    Raises:
        MissingSamplesError: If the operator has no samples.
    """
    found: dict[str, Specialization] = {}
    for values in _calls(kernel):
        if kernel.value_refusal(values) is not None:
            continue
        prepared = kernel.prepare(values)
        for config in kernel.source.configs or (None,):
            arguments = dict(prepared.arguments)
            if config is not None:
                arguments |= config.all_kwargs()
            for name, heuristic in kernel.source.heuristics.items():
                arguments[name] = heuristic(arguments)
            each = specialization_of(kernel, arguments)
            found.setdefault(repr(each), each)
    return list(found.values())


def _calls(kernel: TritonKernel) -> Iterator[list[Any]]:
    """Yield the argument values of each sample, without data, in each dtype that the kernel takes."""
    specification = kernel.operator.specification
    schema = specification.schema
    if specification.samples is None:
        raise errors.MissingSamplesError(
            "there are no samples to compile its kernel for",
            operator=specification.name,
            where=specification.where,
            hint=f"write `@{specification.short_name}.samples` over a function of `make` that yields tuples "
            "of arguments",
        )
    floating = sorted((dtype for dtype in kernel.dtypes if dtype.is_floating_point), key=str)
    for call in samples_of(specification.samples, Make(), schema, specification.name):
        values = schema.call_values(call.args, call.kwargs)
        inexact = any(isinstance(each, Tensor) and each.is_floating_point() for each in values)
        for dtype in floating if inexact else [torch.float32]:
            yield [_without_data(value, dtype) for value in values]


def _without_data(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return [_without_data(item, dtype) for item in value]
    if not isinstance(value, Tensor):
        return value
    copied = dtype if value.is_floating_point() else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=copied, device="meta")


def specialization_of(kernel: TritonKernel, arguments: Mapping[str, Any]) -> Specialization:
    """Return the specialization for values of the parameters, as Triton chooses it at a launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: list[str] = []
    jit = kernel.source.compiled_by()
    defaults = {each.name: each.default for each in jit.params if each.has_default}
    for parameter, described in zip(kernel.source.parameters, jit.params, strict=True):
        name = parameter.name
        value = arguments[name] if name in arguments else defaults[name]
        fixed = described.do_not_specialize
        if parameter.constant or value is None or (_is_whole(value) and value == 1 and not fixed):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = described.annotation_type or kind_of(value)
        if isinstance(value, Tensor) or (_is_whole(value) and value % DIVISOR == 0 and not fixed):
            divisible.append(name)
    options = {name: value for name, value in arguments.items() if name in LAUNCH_OPTIONS}
    return Specialization(signature, constants, tuple(divisible), options)


def kind_of(value: Any) -> str:
    """Return Triton's name for the type of an argument: `*fp32`, `i32`, `i64`, `fp32`, `u1`."""
    from triton.runtime.jit import mangle_type

    on_cpu = torch.empty(1, dtype=value.dtype) if isinstance(value, Tensor) else value
    return str(mangle_type(on_cpu))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
