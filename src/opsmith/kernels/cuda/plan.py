"""Plan of a CUDA kernel's call: the instances, copies, results, scratch buffers and launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.schema import Schema
from opsmith.core.tensors import map_tensors, on_meta
from opsmith.kernels.common.dtypes import dtype_name
from opsmith.kernels.common.parameters import check_written, copy_of, needs_copy
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.launch import Geometry
from opsmith.kernels.cuda.parameters import CudaParameter, PackedParameters, number_places, pack_parameters
from opsmith.kernels.cuda.rules import KernelRules, passed_arguments
from opsmith.kernels.runtime.plan import strides_in
from opsmith.torch_library.contract import refuse_result_shapes
from opsmith.torch_library.result_layouts import ResultLayout, result_layouts


@dataclass(frozen=True, slots=True)
class CudaChoice:
    """Instances that take a call.

    Attributes:
        instances: Instance of each launch.
        parameters: Parameters of each instance.
        taken: For each argument, result and scratch buffer of the launches, a parameter that takes only
            tensors which every launch takes.
    """

    instances: tuple[Instance, ...]
    parameters: tuple[tuple[CudaParameter, ...], ...]
    taken: Mapping[str, CudaParameter]


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One launch of a call.

    Attributes:
        instance: Instance of the kernel.
        geometry: Grid, block and dynamic shared memory.
        packed: Parameters, without addresses.
        tensors: Indices of the passed tensors among all tensors of the call.
        views: Parameter of each passed tensor.
        numbers: Floating-point numbers that may differ between calls: see `runtime.plan.Launch`.
    """

    instance: Instance
    geometry: Geometry
    packed: PackedParameters
    tensors: tuple[int, ...]
    views: tuple[CudaParameter, ...]
    numbers: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """Result or scratch buffer of a call.

    Attributes:
        name: Name of the buffer.
        layout: Layout of the reference's result, or of the scratch buffer.
        written: Name of the layout in which the kernel writes it.
        initial: Number that fills it before the launches; None if it is not filled.
    """

    name: str
    layout: ResultLayout
    written: str
    initial: float | None

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in which the kernel writes it."""
        any_layout = self.written == "any"
        return tuple(self.layout.stride) if any_layout else strides_in(self.layout.shape, self.written)

    def allocate(self, device: torch.device | str) -> Tensor:
        """Allocate the buffer in the layout in which the kernel writes it, and fill it."""
        made = self.layout.allocate(device, self.written)
        return made if self.initial is None else made.fill_(self.initial)


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """Plan for the calls of one signature.

    Attributes:
        copied: Indices of the arguments that are copied into a different layout, with their parameters.
        results: The results.
        scratch: The scratch buffers.
        launches: The launches, in order; empty if there is nothing to write.
        passed: Indices of the arguments that are passed to a kernel.
    """

    copied: tuple[tuple[int, CudaParameter], ...]
    results: tuple[PlannedBuffer, ...]
    scratch: tuple[PlannedBuffer, ...]
    launches: tuple[PlannedLaunch, ...]
    passed: tuple[int, ...]


def without_data(schema: Schema, values: Sequence[Any]) -> list[Any]:
    """Return the argument values of a reference, with `meta` tensors instead of tensors."""
    pairs = zip(schema.arguments, values, strict=True)
    return map_tensors(on_meta, [argument.kind.restore(value) for argument, value in pairs])


def plan_call(
    kernel: BuiltKernel[Any], rules: KernelRules, choice: CudaChoice, values: Sequence[Any]
) -> CudaPlan:
    """Plan the calls that have the signature of these values.

    Args:
        kernel: The kernel.
        rules: Rules of the kernel.
        choice: Instances that take the call.
        values: Argument values.

    Raises:
        LaunchError: If a launch, an initial value or a scratch buffer cannot be computed, or a GPU cannot do
            the launch.
        KernelSignatureError: If the kernel's results differ from the reference's in dtype or dimensions.
        MissingFakeError: If the layouts of the results depend on data.
        ShapeError: If the results of the reference do not have the declared shapes.
    """
    schema = kernel.operator.specification.schema
    layouts = result_layouts(kernel.operator.specification, values)
    refuse_result_shapes(kernel.operator.specification, list(values), layouts)
    names = [result.name for result in schema.results]
    given = without_data(schema, values)
    named = dict(zip(schema.names, given, strict=True))
    named |= {name: layout.allocate("meta") for name, layout in zip(names, layouts, strict=True)}
    scratch = {each.name: each.layout(named) for each in rules.scratch}
    for launch, parameters in zip(rules.launches, choice.parameters, strict=True):
        views = dict(zip(launch.passed, parameters, strict=True))
        for name, layout in zip(names, layouts, strict=True):
            if name in views:
                check_written(kernel, name, layout, views[name], values)
        for name in views.keys() & scratch.keys():
            _check_scratch(kernel, name, scratch[name], views[name])
    named |= {name: layout.allocate("meta") for name, layout in scratch.items()}
    buffers = [
        PlannedBuffer(name, layout, choice.taken[name].layout, rules.initial_number(name, named))
        for name, layout in (*zip(names, layouts, strict=True), *scratch.items())
    ]
    geometries = rules.geometries(named, names, schema.written)
    passed = tuple(schema.names.index(name) for name in passed_arguments(schema))
    copied = []
    laid = dict(named)
    for index in passed:
        name = schema.names[index]
        parameter = choice.taken.get(name)
        if parameter is not None and needs_copy(values[index], parameter):
            copied.append((index, parameter))
            laid[name] = copy_of(given[index], parameter)
    laid |= {each.name: each.layout.allocate("meta", each.written) for each in buffers}
    positions: dict[str, range] = {}
    count = 0
    for name in (*(schema.names[index] for index in passed), *(each.name for each in buffers)):
        more = len(tensors_in([laid[name]]))
        positions[name] = range(count, count + more)
        count += more
    launches = []
    for launch, instance, parameters, geometry in zip(
        rules.launches, choice.instances, choice.parameters, geometries, strict=True
    ):
        if geometry is None:
            continue
        packed = pack_parameters(parameters, [laid[name] for name in launch.passed])
        tensors = tuple(position for name in launch.passed for position in positions[name])
        pairs = zip(launch.passed, parameters, strict=True)
        viewed = tuple(parameter for name, parameter in pairs for _ in positions.get(name, ()))
        numbers = [
            (offset, schema.names.index(name), parameter.item, item)
            for name, parameter, at in zip(launch.passed, parameters, packed.offsets, strict=True)
            for offset, item in number_places(parameter, at, laid[name])
        ]
        launches.append(PlannedLaunch(instance, geometry, packed, tensors, viewed, tuple(numbers)))
    results, rest = tuple(buffers[: len(names)]), tuple(buffers[len(names) :])
    return CudaPlan(tuple(copied), results, rest, tuple(launches), passed)


def _check_scratch(kernel: BuiltKernel[Any], name: str, layout: ResultLayout, view: CudaParameter) -> None:
    """Refuse a parameter that does not match its scratch buffer.

    Raises:
        KernelSignatureError: If dtype, number of dimensions or layout differ.
    """
    if not view.holds(layout.dtype, len(layout.shape)) or view.layout == "channels-last":
        raise kernel.error(
            errors.KernelSignatureError,
            f"the CUDA kernel's view does not match the scratch buffer `{name}`",
            argument=name,
            expected=f"`View` or `Contiguous` of {dtype_name(layout.dtype)}, of {len(layout.shape)} "
            f"dimension{'s' * (len(layout.shape) != 1)}",
            got=str(view),
            hint="change the view, or the sizes and the dtype in `scratch=`",
        )
