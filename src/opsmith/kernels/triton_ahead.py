"""Triton kernels compiled ahead of time, for what an operator's samples make of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.build.cuda.occupancy import occupancy
from opsmith.build.triton.compiling import Specialization, compiled
from opsmith.build.triton.source import LAUNCH_OPTIONS
from opsmith.core.operator import Operator
from opsmith.core.samples import Make, samples_of
from opsmith.kernels.cuda_report import ARCHITECTURES, Usage
from opsmith.kernels.triton import TritonKernel

DIVISOR = 16
"""Triton compiles a kernel anew for numbers that are divisible by this: so it loads several at once."""


def triton_kernels(operator: Operator[..., Any]) -> list[TritonKernel]:
    """The kernels in Triton of an operator, in the order in which they are tried."""
    kernels = dict.fromkeys(each.function for each in operator.specification.kernels)
    return [each for each in kernels if isinstance(each, TritonKernel)]


def triton_usage(kernel: TritonKernel, architectures: Sequence[str] = ARCHITECTURES) -> Iterator[Usage]:
    """Compile a kernel in Triton for each form of arguments in the operator's samples; no GPU is needed.

    Floating tensors come in each dtype that the kernel takes, and in every configuration of
    `triton.autotune`. Addresses are taken to be divisible by 16, as torch allocates.

    Args:
        kernel: The kernel.
        architectures: As `sm_80`, `sm_90`.

    Returns:
        What each takes of a GPU, as of a kernel in CUDA C++.

    Raises:
        MissingSamplesError: If the operator has no samples.
        ToolchainError: If Triton is not installed.
        UsageError: If there is no such architecture.
        CompileError: If Triton refuses the kernel.
    """
    wanted = specializations(kernel)
    for architecture in architectures:
        for each in wanted:
            yield _usage(kernel, each, architecture)


def _usage(kernel: TritonKernel, wanted: Specialization, architecture: str) -> Usage:
    done = compiled(kernel.source, kernel.operator.name, wanted, architecture)
    found = done.resources
    # Of static shared memory the assembler counts what every block of the architecture has reserved.
    estimate = occupancy(architecture, done.threads, found.registers, done.shared)
    return Usage(
        operator=kernel.operator.name,
        where=kernel.where,
        kernel=kernel.entry,
        instance=str(wanted),
        architecture=architecture,
        registers=found.registers,
        spill_stores=found.spill_stores,
        spill_loads=found.spill_loads,
        stack=found.stack,
        shared=found.shared,
        dynamic_shared=done.shared,
        threads=done.threads,
        occupancy=estimate,
        faults=(),
    )


def specializations(kernel: TritonKernel) -> list[Specialization]:
    """What the operator's samples, in every dtype that the kernel takes, have it compiled for.

    Raises:
        MissingSamplesError: If the operator has no samples.
    """
    found: dict[str, Specialization] = {}
    for values in _calls(kernel):
        if kernel.misfit(values) is not None:
            continue
        prepared = kernel.prepared(values)
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
    """The argument values of each sample, without data, in each floating dtype that the kernel takes."""
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
    kept = dtype if value.is_floating_point() else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=kept, device="meta")


def specialization_of(kernel: TritonKernel, arguments: Mapping[str, Any]) -> Specialization:
    """What a kernel is compiled for with these values of its parameters: as Triton would at a launch."""
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
    """What Triton calls the type of an argument: `*fp32`, `i32`, `i64`, `fp32`, `u1`."""
    from triton.runtime.jit import mangle_type

    here = torch.empty(1, dtype=value.dtype) if isinstance(value, Tensor) else value
    return str(mangle_type(here))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
