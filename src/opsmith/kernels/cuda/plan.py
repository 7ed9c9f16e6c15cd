"""Plan for the CUDA calls of one signature: copies, results, launch and packed parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.core.schema import Schema
from opsmith.kernels.common.kernel_from_source import KernelFromSource
from opsmith.kernels.common.parameters import check_written
from opsmith.kernels.common.result_layout import (
    ResultLayout,
    has_layout,
    memory_format,
    on_meta,
    result_layouts,
)
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.launch import Geometry, LaunchRules
from opsmith.kernels.cuda.parameters import (
    CudaParameter,
    PackedParameters,
    pack_parameters,
    passed_arguments,
)


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """Plan for the calls of one signature.

    Attributes:
        instance: Instance of the kernel.
        copied: Indices of the arguments that are copied into another layout, with their parameters.
        results: Layout of each result, and the name of the layout in which the kernel writes it.
        geometry: Launch; None if all results are empty.
        packed: Parameters of the launch, without addresses.
        passed: Indices of the arguments that are passed to the kernel.
    """

    instance: Instance
    copied: tuple[tuple[int, CudaParameter], ...]
    results: tuple[tuple[ResultLayout, str], ...]
    geometry: Geometry | None
    packed: PackedParameters
    passed: tuple[int, ...]


def plan_calls(
    kernel: KernelFromSource[Any],
    values: Sequence[Any],
    instance: Instance,
    parameters: Sequence[CudaParameter],
    rules: LaunchRules,
) -> CudaPlan:
    """Plan the calls that have the signature of this one, from sizes alone.

    Args:
        kernel: The kernel.
        values: Argument values; the data of tensors is not read.
        instance: Instance of the kernel.
        parameters: Parameters of the instance.
        rules: Rules for the launch.

    Raises:
        LaunchError: If the launch cannot be computed, or a GPU cannot do it.
        KernelSignatureError: If the kernel does not write the results of the reference.
    """
    schema = kernel.operator.specification.schema
    passed = tuple(schema.names.index(name) for name in passed_arguments(schema))
    layouts = result_layouts(kernel.operator.specification, values)
    results = []
    for result, layout, view in zip(schema.results, layouts, parameters[len(passed) :], strict=True):
        check_written(kernel, result.name, layout, view)
        results.append((layout, view.layout))
    given = without_data(schema, values)
    named = dict(zip(schema.names, given, strict=True))
    copied = []
    for index, parameter in zip(passed, parameters, strict=False):
        if needs_copy(values[index], parameter):
            copied.append((index, parameter))
            given[index] = copy_of(given[index], parameter)
    written = [layout.allocate("meta", view_layout) for layout, view_layout in results]
    packed = pack_parameters(parameters, [*(given[index] for index in passed), *written])
    names = [result.name for result in schema.results]
    named |= {name: layout.allocate("meta") for name, layout in zip(names, layouts, strict=True)}
    return CudaPlan(instance, tuple(copied), tuple(results), rules.geometry(named, names), packed, passed)


def without_data(schema: Schema, values: Sequence[Any]) -> list[Any]:
    """Return argument values as a reference gets them, with `meta` tensors in place of tensors."""

    def emptied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return on_meta(value)
        return [emptied(item) for item in value] if isinstance(value, list | tuple) else value

    return [
        emptied(argument.kind.restore(value))
        for argument, value in zip(schema.arguments, values, strict=True)
    ]


def needs_copy(value: Any, parameter: CudaParameter) -> bool:
    """Return True if a kernel takes an argument in another layout, or without its negative bit."""
    tensors = tensors_in([value])
    return any(tensor.is_neg() or not has_layout(tensor, parameter.layout) for tensor in tensors)


def copy_of(value: Any, parameter: CudaParameter) -> Any:
    """Copy a tensor, or each of a list, into a parameter's layout; a clone resolves the negative bit."""
    if not isinstance(value, Tensor):
        return [copy_of(item, parameter) for item in value]
    if parameter.layout == "any":
        return value.clone()
    return value.resolve_neg().contiguous(memory_format=memory_format(parameter.layout, value.dim()))
