"""Plan of a C++ kernel's call: the instance, the copies of arguments into other layouts, the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opsmith.core.argument_types import NUMBERED
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.kernels.common.parameters import Parameter, check_written
from opsmith.torch_library.arguments import refuse_shapes
from opsmith.torch_library.result_layouts import ResultLayout, has_layout, result_layouts

_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(NUMBERED["ScalarType"])}


@dataclass(frozen=True, slots=True)
class CppPlan:
    """Plan for the calls of one signature.

    Attributes:
        instance: Address of the instance that computes the results.
        copies: Tensors to copy into another layout first: index among the call's tensors, index of the
            argument, True if it is copied back, strides of the copy.
        results: Layout of each result, and the strides in which the kernel writes it where they differ.
    """

    instance: int
    copies: tuple[tuple[int, int, bool, tuple[int, ...]], ...]
    results: tuple[tuple[ResultLayout, tuple[int, ...] | None], ...]

    def encode(self) -> list[int]:
        """Return the plan as the numbers that `Plan::read` in plans.h expects."""
        numbers = [self.instance, len(self.copies)]
        for tensor, argument, back, strides in self.copies:
            numbers += [tensor, argument, back, len(strides), *strides]
        numbers.append(len(self.results))
        for result, written in self.results:
            numbers += [_DTYPE_NUMBERS[result.dtype], len(result.shape), written is not None]
            numbers += [*result.shape, *result.stride, *(written or ())]
        return numbers


def _strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape in a layout.

    Example:
        >>> _strides((2, 3), "contiguous")
        (3, 1)
    """
    if layout == "channels-last":
        order = [0, *range(2, len(shape)), 1]  # batch, spatial dimensions, channels
        inner = _strides([shape[dim] for dim in order], "contiguous")
        return tuple(dict(zip(order, inner, strict=True))[dim] for dim in range(len(shape)))
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def plan_call(
    kernel: BuiltKernel[Any], values: Sequence[Any], instance: int, parameters: Sequence[Parameter]
) -> CppPlan:
    """Plan the calls that have the signature of these values.

    Args:
        kernel: The kernel.
        values: Argument values.
        instance: Address of the instance that takes them.
        parameters: Parameters of the instance.

    Raises:
        ShapeError: If the tensors do not have the declared shapes.
        KernelSignatureError: If the instance writes results of another dtype or number of dimensions.
    """
    specification = kernel.operator.specification
    refuse_shapes(specification, list(values))
    copies, tensors = [], 0
    for index, (value, parameter) in enumerate(zip(values, parameters, strict=False)):
        for tensor in tensors_in([value]):
            if not has_layout(tensor, parameter.layout):
                strides = _strides(tensor.shape, parameter.layout)
                copies.append((tensors, index, parameter.written, strides))
            tensors += 1
    results: list[tuple[ResultLayout, tuple[int, ...] | None]] = []
    views = parameters[len(specification.schema.arguments) :]
    layouts = result_layouts(specification, values)
    for described, result, view in zip(specification.schema.results, layouts, views, strict=True):
        check_written(kernel, described.name, result, view, values)
        written = result.stride if view.layout == "any" else _strides(result.shape, view.layout)
        results.append((result, None if written == result.stride else written))
    return CppPlan(instance, tuple(copies), tuple(results))
