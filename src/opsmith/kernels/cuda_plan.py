"""How calls of one form are run by a CUDA kernel: told once from sizes, without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.build.cuda.generating import Instance
from opsmith.build.cuda.packing import Packing, pack
from opsmith.build.cuda.parameters import CudaParameter
from opsmith.build.form import Form
from opsmith.core.calls import tensors_in
from opsmith.core.schema import Schema
from opsmith.core.specification import Specification
from opsmith.kernels.choosing import lies_right, memory_format
from opsmith.kernels.cuda_signature import passed
from opsmith.kernels.forms import forms_of
from opsmith.kernels.launching import Geometry, Launching
from opsmith.kernels.signature import check_written


@dataclass(frozen=True, slots=True)
class Plan:
    """How calls of one form are run.

    Attributes:
        instance: What the kernel is compiled for.
        copied: The arguments that are copied into another layout, with their parameters.
        results: The form of each result, and the layout to write it in where that is another one.
        geometry: How it is launched; None where there is nothing to do.
        packing: What it is launched with, but for the addresses.
        given: The positions of the arguments that it is launched with.
    """

    instance: Instance
    copied: tuple[tuple[int, CudaParameter], ...]
    results: tuple[tuple[Form, torch.memory_format | None], ...]
    geometry: Geometry | None
    packing: Packing
    given: tuple[int, ...]


def planned(
    specification: Specification,
    values: Sequence[Any],
    instance: Instance,
    parameters: Sequence[CudaParameter],
    launching: Launching,
    where: str,
) -> Plan:
    """Plan the calls that have the form of this one.

    Args:
        specification: The operator.
        values: Its argument values; tensors without data serve.
        instance: What the kernel is compiled for.
        parameters: Those of the instance.
        launching: What the author says of the launch.
        where: `file:line` of the kernel.

    Raises:
        LaunchError: If it cannot be told how to launch it, or a GPU cannot do that.
        KernelSignatureError: If it does not write the results that the reference gives.
    """
    schema = specification.schema
    forms = forms_of(specification, values)
    named = dict(zip(schema.names, bare(schema, values), strict=True))
    positions = tuple(schema.names.index(name) for name in passed(schema))
    written = parameters[len(positions) :]
    results = []
    for result, form, parameter in zip(schema.results, forms, written, strict=True):
        check_written(result.name, form, parameter, "CUDA", specification.name, where)
        other = None if parameter.layout == "any" else memory_format(parameter, len(form.shape))
        results.append((form, other))
    copied = [
        (position, parameter)
        for position, parameter in zip(positions, parameters, strict=False)
        if must_copy(values[position], parameter)
    ]
    laid = dict(named)
    for position, parameter in copied:
        laid[schema.names[position]] = copy_of(named[schema.names[position]], parameter)
    made = [allocated(form, other, "meta") for form, other in results]
    packing = pack(parameters, [*(laid[schema.names[at]] for at in positions), *made])
    names = [result.name for result in schema.results]
    ends = [torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta") for form in forms]
    geometry = launching.geometry(named | dict(zip(names, ends, strict=True)), names)
    return Plan(instance, tuple(copied), tuple(results), geometry, packing, positions)


def bare(schema: Schema, values: Sequence[Any]) -> list[Any]:
    """Argument values in the form that a reference gets them in, with tensors that have no data."""

    def formed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return [formed(item) for item in value] if isinstance(value, list | tuple) else value

    return [
        formed(argument.kind.restore(value)) for argument, value in zip(schema.arguments, values, strict=True)
    ]


def must_copy(value: Any, parameter: CudaParameter) -> bool:
    """Whether a kernel takes an argument in another form than it has."""
    return any(tensor.is_neg() or not lies_right(tensor, parameter) for tensor in tensors_in([value]))


def copy_of(value: Any, parameter: CudaParameter) -> Any:
    """A tensor, or each of a list, as a parameter takes it; a clone has numbers for a negative bit."""
    if isinstance(value, Tensor):
        if parameter.layout == "any":
            return value.clone()
        return value.resolve_neg().contiguous(memory_format=memory_format(parameter, value.dim()))
    return [copy_of(item, parameter) for item in value]


def allocated(form: Form, other: torch.memory_format | None, device: torch.device | str) -> Tensor:
    """Memory for a result."""
    if other is None:
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device)
    return torch.empty(form.shape, dtype=form.dtype, device=device, memory_format=other)


def in_form(result: Tensor, form: Form) -> Tensor:
    """A copy of a result in the strides that it has in the end."""
    copy = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=result.device)
    copy.copy_(result)
    return copy


def constants_of(launching: Launching, schema: Schema, values: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """The numbers of a kernel's template in a call.

    Raises:
        LaunchError: If one of them cannot be told.
    """
    named: Mapping[str, Any] = dict(zip(schema.names, bare(schema, values), strict=True))
    return launching.constants_of(named) if launching.constants else ()
